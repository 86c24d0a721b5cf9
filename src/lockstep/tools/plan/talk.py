"""What the ranks of a step say to each other, and how long they wait for it: each way of
training, as its own code goes about it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.collectives.network import Network
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.tools.plan import overlap
from lockstep.tools.plan.carriers import Cost, OneHost, cost, quickest
from lockstep.tools.plan.mesh_share import MeshShare
from lockstep.tools.plan.sends import Message, messages
from lockstep.tools.plan.work import RankWork


@dataclass(frozen=True, slots=True)
class Talk:
    """Of a step; where ranks meet every H steps, an H-th of a meeting."""

    exposed: float
    """Seconds behind which nothing is computed."""
    busy: float
    """Seconds that the link is in use."""
    sent: float
    """Bytes, by the rank that sends most."""


SILENCE = Talk(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TalkingRanks:
    """Who talks, over what."""

    workers: int
    network: Network | OneHost
    native: tuple[str, ...]
    """The schedules that stand for the backend's own all-reduce."""
    stretch: float = 1.0
    """By which everything on the link takes longer than the network says."""
    software: float = 0.0
    """Seconds that a collective takes at the least, however quick the network is."""

    def cost(self, message: Message) -> Cost:
        if isinstance(self.network, OneHost):
            return self.network.cost(self.workers)
        if message.algorithm == "native":
            names = self.native if message.kind == "all_reduce" else ("ring",)
            return quickest(self.network, message.kind, names, self.workers, message.bytes)
        return cost(self.network, message.kind, message.algorithm, self.workers)

    def small(self, bytes: float) -> float:
        """Seconds of what the library itself has to tell."""
        if isinstance(self.network, OneHost):
            return self.stretch * self.network.small[self.workers]
        return self._seconds(
            quickest(
                self.network, "all_reduce", ("ring", "recursive_doubling"), self.workers, bytes
            ),
            bytes,
        )

    def seconds(self, message: Message) -> float:
        return self._seconds(self.cost(message), message.bytes)

    def _seconds(self, of: Cost, bytes: float) -> float:
        """What was measured on one host has the software's part in it."""
        if not bytes or not of.rounds:
            return 0.0
        least = 0.0 if isinstance(self.network, OneHost) else self.software
        return self.stretch * (max(least, of.latency) + bytes * of.per_byte)

    def sent(self, message: Message) -> float:
        return self.cost(message).sends * message.bytes


def talk(method: Parallelism, rank: RankWork, ranks: TalkingRanks, part: MeshShare | None) -> Talk:
    """`rank` is what the slowest one does, in seconds that include its lateness; `part` is there
    where a mesh splits the model.
    """
    if ranks.workers == 1:
        return SILENCE
    if part is not None:
        assert method.mesh is not None
        return _on_mesh(method, method.mesh, ranks, part)
    if method.server is not None:
        return _with_server(method, rank, ranks)
    if method.local is not None:
        return _meeting(method, rank, ranks)
    return _every_step(method, rank, ranks)


def _every_step(method: Parallelism, rank: RankWork, ranks: TalkingRanks) -> Talk:
    """The facts of a step, all gradients, then what BatchNorm moved; a sharded update then has
    everybody told the parameters.
    """
    at_the_end = isinstance(ranks.network, OneHost) and not ranks.network.beside
    facts = ranks.small(rank.facts) if rank.facts else 0.0
    buckets = [overlap.QueuedBucket(0.0, *((0.0, facts) if at_the_end else (facts, 0.0)))]
    sent = 0.0
    for bucket in rank.buckets:
        sends = messages(method, bucket, rank.width, ranks.workers)
        late = sum(ranks.seconds(each) for each in sends if each.late or at_the_end)
        buckets.append(
            overlap.QueuedBucket(
                bucket.ready, sum(ranks.seconds(each) for each in sends) - late, late
            )
        )
        sent += sum(ranks.sent(each) for each in sends)
    ended = overlap.replicated(rank.computation - rank.backward, rank.backward, buckets)
    after = []
    more = ranks.small(rank.buffers) if rank.buffers else 0.0
    if method.update == "sharded":
        after = [
            Message("all_gather", "native", rank.width * bucket.elements) for bucket in rank.buckets
        ]
    more += sum(ranks.seconds(each) for each in after)
    return Talk(
        ended.arrived - ended.computed + more,
        ended.busy + more,
        sent + sum(ranks.sent(each) for each in after),
    )


def _meeting(method: Parallelism, rank: RankWork, ranks: TalkingRanks) -> Talk:
    """How far every replica has moved, every H steps: nothing leaves in a backward. With
    overlap, while the next steps are computed.
    """
    assert method.local is not None
    every = method.sync_every or 1
    sends = [
        each
        for bucket in rank.buckets
        for each in messages(method, bucket, rank.width, ranks.workers)
    ]
    whole = sum(ranks.seconds(each) for each in sends)
    sent = sum(ranks.sent(each) for each in sends)
    behind = method.local.overlap * (rank.computation + rank.optimizer)
    return Talk(max(0.0, whole - behind) / every, whole / every, sent / every)


def _with_server(method: Parallelism, rank: RankWork, ranks: TalkingRanks) -> Talk:
    """The first ranks own a part each: gradients go to the owners, parameters come back; an
    owner's own stay where they are.
    """
    assert method.server is not None
    if isinstance(ranks.network, OneHost):
        raise UsageError(
            f"update={method.update!r} has not been measured on this host: name a network"
        )
    workers = ranks.workers
    owners = min(method.server.shards or workers, workers)
    owned = rank.bytes / owners
    of_owner = (rank.bytes - owned) + (workers - 1) * owned
    sent = max(of_owner, rank.bytes if owners < workers else 0.0)
    alone = ranks.network.ranks_per_node >= workers
    link = ranks.network.within if alone else ranks.network.between
    shared = 1 if alone else ranks.network.ranks_per_node
    whole = ranks.stretch * (2 * link.latency + sent * shared / link.bandwidth)
    # a rank computes on while its gradients travel
    behind = 0.0 if method.bound == 0 else rank.computation + rank.optimizer
    return Talk(max(0.0, whole - behind), whole, sent)


def _on_mesh(method: Parallelism, mesh: Mesh, ranks: TalkingRanks, part: MeshShare) -> Talk:
    """Gradients are summed over the ranks that hold the same part; where parameters are sharded,
    after they were scattered.
    """
    assert isinstance(part.data, Network)
    replicas = replace(ranks, workers=mesh.data, network=part.data)
    if mesh.shard == 1:
        found = _every_step(method, part.work, replicas) if mesh.data > 1 else SILENCE
    else:
        found = _sharded(
            mesh, part, ranks, replicas, replace(ranks, workers=mesh.shard, network=part.shard)
        )
    return Talk(
        found.exposed + ranks.stretch * part.exposed,
        found.busy + ranks.stretch * part.exposed,
        found.sent + part.sent,
    )


def _sharded(
    mesh: Mesh,
    part: MeshShare,
    everyone: TalkingRanks,
    replicas: TalkingRanks,
    shards: TalkingRanks,
) -> Talk:
    """Bucket by bucket: the parameters are gathered before each use, the gradients scattered,
    and what is left of them summed over replicas.
    """
    rank, groups, sent = part.work, [], 0.0
    turns = rank.micro_batches
    for place, bucket in enumerate(rank.buckets):
        size = rank.width * bucket.elements
        gather = Message("all_gather", "native", size)
        scatter = Message("reduce_scatter", "ring", size)
        summed = Message("all_reduce", "native", size / mesh.shard)
        seconds = shards.seconds(scatter) + (replicas.seconds(summed) if mesh.data > 1 else 0.0)
        groups.append(overlap.GatheredLayers(bucket.ready, shards.seconds(gather), seconds))
        gathers = 1 if place == 0 else 2  # what ends the forward begins the backward, and is there
        sent += turns * (
            gathers * shards.sent(gather)
            + shards.sent(scatter)
            + (replicas.sent(summed) if mesh.data > 1 else 0.0)
        )
    ended = overlap.sharded(rank.forward, rank.backward, turns, groups)
    # the facts of a step travel behind its last backward
    more = everyone.small(rank.buffers) if rank.buffers else 0.0
    return Talk(ended.arrived - rank.computation + more, ended.busy + more, sent)
