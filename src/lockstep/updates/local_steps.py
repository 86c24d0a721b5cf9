"""Local steps: every rank steps alone with its own optimizer, and the replicas synchronize every H
steps.

    step         forward, backward, inner optimizer: on this rank's micro-batches, without messages
    synchronize  average the movements of all replicas since the last synchronization; all replicas
                 continue from one place (OuterStep)
    fragment     some buckets of the parameters, which synchronize together; several fragments are
                 spread over the H steps

A movement's weight is what the replica has learned from since then (samples, tokens). So an idle
rank does not hold the others back, and with H = 1 and plain SGD synchronizing is gradient
averaging. The inner optimizers' states stay where they are. With `overlap` a fragment's sum travels
while the next steps are computed. When it arrives, the replica continues from halfway between itself and the
new place (Streaming DiLoCo, Douillard et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.checkpoints.pieces import TensorPiece
from lockstep.collectives.work import Work
from lockstep.config.parallelism import Outer
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.reductions import Alone
from lockstep.runtime import status
from lockstep.updates.optimizer_state import WholeOptimizer, whole_pieces
from lockstep.updates.replicated_and_sharded import Replicated
from lockstep.updates.shards import places
from lockstep.updates.synchronized_buffers import SynchronizedBuffers
from lockstep.updates.update import EndedWindow, Updated

_MIXED = (
    0.5  # with overlap, the share of the replica's own values that stays after a synchronization
)


@dataclass(slots=True)
class _Flight:
    """A fragment whose movements are being summed."""

    fragment: int
    lands: int
    """The local step after which the sum is applied."""
    weight: float
    works: list[Work]


class OuterStep:
    """How a synchronization combines the replicas: it moves the flat tensors `starts` by a
    step against the replicas' mean movement.

    average    start - movement                   parameter averaging, local SGD (Stich, ICLR 2019)
    nesterov   SGD with Nesterov momentum, with   DiLoCo (Douillard et al., 2023)
               the movement as gradient

    All ranks pass the same movements, and have the same bits afterwards.
    """

    def __init__(self, outer: Outer, starts: list[Tensor]) -> None:
        self._outer = outer
        self.starts = starts
        self.momenta = (
            [torch.zeros_like(start) for start in starts] if outer.kind == "nesterov" else []
        )

    @torch.no_grad()
    def move(self, index: int, movement: Tensor) -> None:
        """Move start number `index` by the mean movement, whose tensor is overwritten."""
        start = self.starts[index]
        if not self.momenta:
            start.sub_(movement)
            return
        momentum = self.momenta[index].mul_(self._outer.momentum).add_(movement)
        start.sub_(movement.add_(momentum, alpha=self._outer.momentum), alpha=self._outer.lr)


class RankZeros(WholeOptimizer):
    """The optimizer state in checkpoints: rank 0's in the place where other updates look for it,
    those of the other ranks by rank.
    """

    def __init__(self, updated: Updated) -> None:
        super().__init__(updated.reducer, updated.optimizer)
        self._first = updated.everyone.rank == 0

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[list[TensorPiece], list[TensorPiece]]:
        return [], super().pieces(name_of)[0] if self._first else []


class LocalSteps(Replicated):
    """This rank's own update. Each fragment synchronizes once in `every` steps.

    Every rank takes the same number of steps, even if it has nothing to learn from.
    """

    name = "local steps"
    follows = True

    def __init__(self, updated: Updated, every: int, outer: Outer) -> None:
        super().__init__(updated)
        reducer = updated.reducer
        assert isinstance(reducer.reduction, Alone)
        self.optimizer = RankZeros(updated)
        self._everyone, self._every, self._outer = updated.everyone, every, outer
        self._reducer, self._reduction = reducer, reducer.reduction.over_all_ranks
        self._buffers = SynchronizedBuffers(updated.model, self._everyone)
        self.taken = 0
        """Local steps so far."""
        self._parted_at = 0  # `taken` at the last synchronization of all fragments, without overlap
        self._flights: list[_Flight] = []
        # fix the order of buckets, the same on all ranks: no bucket leaves early
        reducer.lay(reducer.order)
        self._lay()

    def _lay(self) -> None:
        reducer = self._reducer
        self._layouts, self._generation = reducer.layouts, reducer.generation
        self._names, self._buckets = reducer.names, list(reducer.buckets)
        self._step = OuterStep(self._outer, [self._copied(bucket) for bucket in reducer.buckets])
        self._fragments = fragments_of(
            [bucket.sum.numel() for bucket in reducer.buckets], self._outer.fragments
        )
        self._since = [0.0] * len(self._fragments)
        self._moving: list[Bucket] = list(reducer.buckets)
        if self._outer.overlap:
            # separate memory: the next steps' gradients need the buckets while sums travel
            memory = self._reduction.memory(reducer.layout)
            self._moving = [
                Bucket(plan, reducer.parameters, room)
                for plan, room in zip(reducer.layout.buckets, memory, strict=True)
            ]

    @torch.no_grad()
    def _copied(self, bucket: Bucket) -> Tensor:
        """Return a copy of a bucket's parameters, with the bucket's layout."""
        flat = torch.zeros_like(bucket.sum)
        for _, parameter, place in places(flat, bucket):
            place.copy_(parameter)
        return flat

    def follow(self) -> None:
        """Follow layers that were added, frozen or unfrozen. All ranks call it in the same step."""
        if self._reducer.layouts == self._layouts:
            return
        if self._reducer.generation == self._generation:
            # new layout of the same parameters: happens only before the first step
            self._lay()
            return
        if not self.synchronized:
            raise UsageError("layers-changed-between-meetings")
        known = set(self._names)
        for name, parameter in self._parameters:
            if name not in known:
                self._everyone.broadcast(
                    parameter.detach(), place=f"for {name}, which joined the training"
                ).wait()
        momenta = self._named(self._step.momenta)
        self._reducer.lay(self._reducer.order)
        self._lay()
        self._fill(self._step.momenta, momenta)

    def replicated(self) -> Sequence[tuple[str, Tensor]]:
        """The outer momenta. Inner states differ between synchronizations, so they are left out."""
        return [
            (f"outer/momentum/{name}", value)
            for name, value in self._named(self._step.momenta).items()
        ]

    # -- synchronization --------------------------------------------------------------------------

    @property
    def synchronized(self) -> bool:
        """Whether all ranks hold the same model: no rank has taken a step since the last
        synchronization of all fragments. The same on all ranks.
        """
        return not self._flights and self._parted_at == self.taken

    def synchronize_if_due(self, ended: EndedWindow) -> bool:
        assert ended.outcome is not None
        weight = ended.weight if ended.outcome.applied else 0.0
        self.taken += 1
        self._since = [since + weight for since in self._since]
        self._buffers.learned(weight)
        self._land(lambda flight: flight.lands <= self.taken)
        since, count = self.taken - self._parted_at, len(self._fragments)
        due = [
            part
            for part in range(count)
            if since % self._every == (part + 1) * self._every // count % self._every
        ]
        heard = False
        for fragment in due:
            heard = self._send(fragment, self.taken + self._outer.overlap, stop=ended.stop)
            if not self._outer.overlap:
                self._land(lambda flight: True)
        if due and count == 1 and not self._outer.overlap:
            self._parted_at = self.taken
        return heard

    def synchronize(self, *, stop: bool = False) -> bool:
        """Synchronize all fragments now, if any rank has taken a step since. Every rank calls it.
        Return whether one of them asks to stop.
        """
        if self.synchronized:
            return False
        self._land(lambda flight: True)
        heard = False
        for fragment in range(len(self._fragments)):
            heard = self._send(fragment, self.taken, stop=stop)
            self._land(lambda flight: True, mixed=False)
        self._parted_at = self.taken
        return heard

    @torch.no_grad()
    def _send(self, fragment: int, lands: int, *, stop: bool) -> bool:
        """Start the sum of a fragment's movements. The buffers synchronize with the last fragment.
        Return whether a rank asks to stop.
        """
        buffers = fragment == len(self._fragments) - 1
        with status.inside("reduce"):
            weight = self._since[fragment]
            facts = torch.tensor(
                [weight, float(stop), *self._buffers.changed(buffers)], dtype=torch.float64
            )
            self._everyone.host.all_reduce(
                facts, place=f"for the facts of a synchronization after local step {self.taken}"
            ).wait()
            total, stops, *changed = facts.tolist()
            works = []
            for index in self._fragments[fragment]:
                bucket = self._moving[index]
                self._movement(bucket, self._step.starts[index], weight)
                works.append(self._reduction.start(bucket))
            self._flights.append(_Flight(fragment, lands, total, works))
            self._since[fragment] = 0.0
            if buffers:
                self._buffers.synchronize(changed, total)
        return bool(stops > 0)

    def _movement(self, bucket: Bucket, start: Tensor, weight: float) -> None:
        """Write into the bucket how far its parameters have moved, times the weight."""
        bucket.sum.zero_()
        if weight == 0:
            return
        for (_, parameter, place), view in zip(places(start, bucket), bucket.views, strict=True):
            torch.sub(place, parameter, out=view)
        bucket.sum.mul_(weight)

    @torch.no_grad()
    def _land(self, due: Callable[[_Flight], bool], *, mixed: bool = True) -> None:
        """Wait for the sums that are due, and apply them."""
        for flight in [each for each in self._flights if due(each)]:
            self._flights.remove(flight)
            with status.inside("reduce"):
                for work in flight.works:
                    work.wait()
            keep = _MIXED if mixed and self._outer.overlap else 0.0
            for index in self._fragments[flight.fragment]:
                bucket = self._moving[index]
                if flight.weight > 0:
                    self._step.move(index, bucket.sum.div_(flight.weight))
                for _, parameter, place in places(self._step.starts[index], bucket):
                    if keep:
                        parameter.lerp_(place, 1 - keep)
                    else:
                        parameter.copy_(place)
                bucket.sum.zero_()

    # -- what a checkpoint keeps ------------------------------------------------------------------

    def model(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model that all ranks agree on: that of the last synchronization, if any rank has
        taken steps since.
        """
        if self.synchronized:
            return dict(weights)
        return {**weights, **self._named(self._step.starts), **self._buffers.starts()}

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        common = dict(self.replicated())
        common["outer/taken"] = torch.tensor([self.taken, self._parted_at])
        own: dict[str, Tensor] = {}
        for flight in self._flights:  # the sums are the same on all ranks
            for work in flight.works:
                work.wait()
            flight.works = []
            common[f"outer/flight/{flight.fragment}"] = torch.tensor(
                [flight.lands, flight.weight], dtype=torch.float64
            )
            for index in self._fragments[flight.fragment]:
                bucket = self._moving[index]
                for name, _, place in places(bucket.sum, bucket):
                    common[f"outer/flying/{name}"] = place
        if not self.synchronized:
            own |= {f"replica/{name}": each.detach() for name, each in self._parameters}
            own |= {f"buffer/{name}": each for name, each in self._buffers.now().items()}
            own["since"] = torch.tensor([*self._since, self._buffers.since], dtype=torch.float64)
        if self._everyone.rank > 0:
            names = {id(each): name for name, each in self._parameters}
            inner = whole_pieces(
                self._updated.optimizer, self._reducer.parameters, lambda each: names[id(each)]
            )
            own |= {f"inner/{piece.name}": piece.data for piece in inner}
        return common, own

    @torch.no_grad()
    def take_back(
        self, common: Mapping[str, Tensor], by_rank: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """A rank that was in the checkpoint resumes from its own replica, a new one from the last
        synchronization. Checkpoints from before local steps hold no such state.
        """
        self.taken, self._parted_at = (
            int(value) for value in common.get("outer/taken", torch.zeros(2)).tolist()
        )
        for index, bucket in enumerate(self._reducer.buckets):
            self._step.starts[index] = self._copied(bucket)
        self._buffers.restart()
        self._fill(self._step.momenta, _under(common, "outer/momentum/"))
        self._flights = []
        for fragment, flight in _under(common, "outer/flight/").items():
            lands, weight = flight.tolist()
            self._flights.append(_Flight(int(fragment), int(lands), weight, []))
        flying = _under(common, "outer/flying/")
        for bucket in self._moving:
            for name, _, place in places(bucket.sum, bucket):
                if name in flying:
                    place.copy_(flying[name])
        own = by_rank[self._everyone.rank] if self._everyone.rank < len(by_rank) else {}
        replica = _under(own, "replica/")
        for name, parameter in self._parameters:
            if name in replica:
                parameter.copy_(replica[name])
        self._buffers.take(_under(own, "buffer/"))
        if "since" in own and len(own["since"]) == len(self._since) + 1:
            *self._since, self._buffers.since = own["since"].tolist()
        self._take_inner(_under(own, "inner/"))

    def _take_inner(self, states: Mapping[str, Tensor]) -> None:
        parameters = dict(self._parameters)
        for key, value in states.items():
            state, _, name = key.partition("/")
            if name in parameters:
                self._updated.optimizer.state[parameters[name]][state].copy_(value)

    @property
    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._reducer.names, self._reducer.parameters, strict=True))

    def _named(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parameters' places, by name, in flat tensors with the layout of the buckets."""
        return {
            name: place
            for flat, bucket in zip(flats, self._buckets, strict=bool(flats))
            for name, _, place in places(flat, bucket)
        }

    def _fill(self, flats: Sequence[Tensor], values: Mapping[str, Tensor]) -> None:
        for name, place in self._named(flats).items():
            if name in values:
                place.copy_(values[name])


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide buckets of these sizes into at most `count` runs of about equal size. No run is empty;
    there are fewer runs than `count` if there are fewer buckets.
    """
    total, before, found = sum(sizes), 0, dict[int, list[int]]()
    for index, size in enumerate(sizes):
        found.setdefault(min(count - 1, int(count * (before + size / 2) / total)), []).append(index)
        before += size
    return list(found.values())


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
