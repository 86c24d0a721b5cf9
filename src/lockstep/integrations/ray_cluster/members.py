"""Which nodes of the cluster take part, and with how many ranks each.

invited     an actor is started there, with the resources of its ranks
admitted    it has the driver's versions and files: its fork server imports what ranks need
ready       ranks can be started there
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.integrations.ray_cluster import cluster
from lockstep.integrations.ray_cluster.cluster import ClusterNode
from lockstep.integrations.ray_cluster.job import Job, NodeFacts, digest, versions
from lockstep.integrations.ray_cluster.node import Node
from lockstep.launcher.engine import LocalRanks
from lockstep.launcher.stop import print_line
from lockstep.launcher.supervise import Outcome

# seconds that an actor waits for a message, before it answers that there is none
_WAIT_SECONDS = 10.0
_SURVEY_SECONDS = 1.0  # seconds between two looks at the cluster's nodes
_SILENT_SECONDS = 15.0  # seconds after which a node that does not answer is named
# seconds that a node is not used after its actor has gone: Ray may list it for a while
_DOUBT_SECONDS = 30.0


class NoFolder(Exception):
    """A node does not see the folder of the task or script."""


@dataclass(eq=False, slots=True)
class Member:
    """A node that takes part, or is about to."""

    node: ClusterNode
    reserved: int
    """The number of ranks that it has resources for."""
    actor: Any
    pending: Any = None
    """Ray's reference to the actor's next answer: its messages."""
    admitted: bool = False
    ready: bool = False
    shift_ns: int = 0
    """The ns to add to its monotonic clock to get the driver's."""
    ranks: LocalRanks | None = None
    store: tuple[str, int] | None = None
    outcome: Outcome | None = None

    def send(self, kind: str, content: object = None) -> None:
        self.actor.send.remote(kind, content)

    def listen(self) -> None:
        self.pending = self.actor.receive.options(concurrency_group="words").remote(_WAIT_SECONDS)


Message = tuple[Member, str, Any]
"""Who reports, the kind of the report, and its content."""


class Members:
    """All nodes that take part, as Ray and the nodes themselves report."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.gpus = cluster.has_gpus() if job.gpus is None else job.gpus
        self._head = cluster.Head()
        self._surveyed = 0.0
        self._excluded: dict[str, float] = {}  # by node: the time until which it is not used
        self._members: dict[str, Member] = {}
        self._nodes: Sequence[ClusterNode] = ()
        self.leaving: set[str] = set()
        """Nodes that Ray is draining: their machines are about to be taken away."""
        self.first = True
        """Whether no rank has been started yet. Until then a node that does not fit ends the
        command. Later the run continues without such a node.
        """

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def survey(self, every: float = _SURVEY_SECONDS) -> None:
        """Ask Ray which nodes there are, at most once in `every` seconds."""
        now = time.monotonic()
        if now - self._surveyed < every:
            return
        self._surveyed = now
        self._head.check()
        nodes = []
        for node in cluster.nodes(gpus=self.gpus):
            if self._excluded.get(node.id, 0.0) < now:
                nodes.append(node)
        self.leaving = {node.id for node in nodes if node.leaves}
        # Nodes that take part already come first, and keep their ranks; then the largest nodes.
        nodes.sort(key=lambda node: node.slots, reverse=True)
        usable = {node.id: node for node in nodes if not node.leaves}
        in_order = dict.fromkeys((*self._members, *usable))
        self._nodes = [usable[node_id] for node_id in in_order if node_id in usable]

    def wanted(self) -> dict[ClusterNode, int]:
        """Return how many ranks each of the present nodes is to take."""
        most = self._job.each or self._job.most
        counts = shared([min(node.slots, most) for node in self._nodes], self._job.most)
        return {node: count for node, count in zip(self._nodes, counts, strict=True) if count}

    def ready(self, wanted: Mapping[ClusterNode, int]) -> dict[Member, int]:
        """Return the nodes of `wanted` that can take their ranks now."""
        ready = {}
        for node, count in wanted.items():
            member = self._members.get(node.id)
            if member is not None and member.ready and member.reserved >= count:
                ready[member] = count
        return ready

    def invite(self, wanted: Mapping[ClusterNode, int], *, known: bool = True) -> None:
        """Start an actor on each of these nodes. `known`: also replace one that has too few
        resources.
        """
        job = self._job
        for node, count in wanted.items():
            member = self._members.get(node.id)
            if member is not None:
                if not known or member.reserved >= count:
                    continue
                self.dismiss(member)
            code = job.code or Path()
            arguments = (job.folder, str(code), digest(code))
            actor = cluster.actor(Node, arguments, node, count, gpus=self.gpus)
            member = Member(node, count, actor)
            self._members[node.id] = member
            member.listen()

    def messages(self, seconds: float) -> Iterator[Message]:
        """Yield what nodes report, after at most `seconds`, and ("gone", reason) for nodes that
        have gone: Ray then answers for their actors.
        """
        pending = {member.pending: member for member in self}
        for reference in cluster.wait(list(pending), seconds):
            member = pending[reference]
            answer = cluster.answer(reference)
            if isinstance(answer, str):
                yield from self._silent(member, answer)
                continue
            for kind, content in answer:
                if kind == "facts":
                    self._admit(member, content)
                elif kind == "ready":
                    member.ready = True
                elif kind == "gone":
                    yield from self._lost(member, content)
                else:
                    yield member, kind, content
            if self._members.get(member.node.id) is member:
                member.listen()

    def _silent(self, member: Member, reason: str) -> Iterator[Message]:
        """Handle an actor that does not answer any more."""
        lives = any(node.id == member.node.id for node in cluster.nodes(gpus=self.gpus))
        if isinstance(reason, cluster.Unable) and not member.admitted and lives:
            label = member.node.label
            self._refuse(member, UsageError("node-cannot-take-part", node=label, why=str(reason)))
        else:
            yield from self._lost(member, reason)

    def _lost(self, member: Member, reason: str) -> Iterator[Message]:
        self.exclude(member)
        yield member, "gone", reason

    def _admit(self, member: Member, facts: NodeFacts) -> None:
        """Start the fork server of a node that fits."""
        label = member.node.label
        for name, local in versions().items():
            remote = facts.versions[name]
            if remote != local:
                values = {"name": name, "there": remote, "node": label, "here": local}
                self._refuse(member, UsageError("version-differs", **values))
                return
        if self._job.folder and not facts.same_code:
            if self.first and self._job.call is None:
                raise NoFolder
            path = str(self._job.code or self._job.folder)
            self._refuse(member, UsageError("code-differs", node=label, path=path))
            return
        member.shift_ns = time.monotonic_ns() - facts.monotonic_ns
        member.admitted = True
        member.actor.start.remote(self._job, member.node.address)

    def _refuse(self, member: Member, error: UsageError) -> None:
        if self.first:
            raise error
        self.exclude(member, math.inf)
        print_line(f"warning: {error}; the run does without it")

    def missing(self, wanted: Mapping[ClusterNode, int], seconds: float) -> str:
        """Return a sentence about the resources or nodes that the run has waited for, for
        `seconds`; "" if all nodes are starting as they should.
        """
        kind = "GPUs" if self.gpus else "CPUs"
        least = self._job.least
        most = self._job.most
        lacking = least - sum(wanted.values())
        if lacking > 0:
            nodes = ", ".join(f"{node.label} with {node.slots}" for node in self._nodes)
            workers = f"{least}:{most}" if least < most else str(most)
            return (
                f"waiting for {lacking} more {kind}: --workers {workers}; nodes of the cluster:"
                f" {nodes or 'none'}"
            )
        silent = [node.label for node in wanted if not self._members[node.id].admitted]
        if not silent or seconds <= _SILENT_SECONDS:
            return ""
        return (
            f"waiting for {', '.join(silent)}: other jobs may be using the {kind} (`ray status`"
            " shows them)"
        )

    def exclude(self, member: Member, seconds: float = _DOUBT_SECONDS) -> None:
        """Do not use the member's node for `seconds`."""
        self._excluded[member.node.id] = time.monotonic() + seconds
        self.dismiss(member)

    def dismiss(self, member: Member) -> None:
        if self._members.get(member.node.id) is member:
            del self._members[member.node.id]
        cluster.kill(member.actor)

    def close(self) -> None:
        """End the actors of all nodes, and the processes that they have started."""
        ends = [member.actor.end.remote() for member in self if member.admitted]
        cluster.wait(ends, _WAIT_SECONDS, all_of_them=True)
        for member in self:
            self.dismiss(member)


def shared(slots: Sequence[int], most: int) -> list[int]:
    """Return how many of at most `most` ranks each node takes; `slots` is each node's room. Pure:
    nodes are filled in their order.
    """
    counts = []
    for room in slots:
        count = min(room, most)
        counts.append(count)
        most -= count
    return counts
