"""Local steps: every rank steps alone with its own optimizer, and the replicas meet every H steps.

    step        forward, backward, inner optimizer: on this rank's micro-batches, with no message at
                all
    meeting     how far each replica has moved since the last one is averaged, and all go on from
                one place (OuterStep)
    fragment    some buckets of the parameters, which meet together; with several, one after the
                other, spread over the H steps

A movement is weighted by what the replica has learned from since (samples, tokens), so an idle rank
does not hold the others back, and with H = 1 and plain SGD the meeting is gradient averaging. Inner
optimizer states stay where they are. With `overlap` a fragment's sum travels while the next steps
are computed; when it is there the replica goes on from halfway between itself and the new place
(Streaming DiLoCo, Douillard et al., 2025).
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
from lockstep.updates.meeting_buffers import MeetingBuffers
from lockstep.updates.optimizer_state import WholeOptimizer, whole_pieces
from lockstep.updates.replicated_and_sharded import Replicated
from lockstep.updates.shards import places
from lockstep.updates.update import EndedWindow, Updated

_MIXED = 0.5  # of a replica that went on while its fragment met, the share that stays


@dataclass(slots=True)
class _Flight:
    """A fragment whose movements are being summed."""

    fragment: int
    lands: int
    """The step after which it is made use of."""
    weight: float
    works: list[Work]


class OuterStep:
    """What a meeting makes of replicas that have gone their own ways: a step of some flat tensors
    `starts`, against their mean movement.

    average    start - movement                                  parameter averaging, local SGD (Stich, ICLR 2019)
    nesterov   SGD with Nesterov momentum, movement as gradient  DiLoCo (Douillard et al., 2023)

    All ranks give it the same movements, and have the same bits after it.
    """

    def __init__(self, outer: Outer, starts: list[Tensor]) -> None:
        self._outer = outer
        self.starts = starts
        self.momenta = (
            [torch.zeros_like(start) for start in starts] if outer.kind == "nesterov" else []
        )

    @torch.no_grad()
    def move(self, index: int, movement: Tensor) -> None:
        """Move the start of that number by the mean movement, which is used up."""
        start = self.starts[index]
        if not self.momenta:
            start.sub_(movement)
            return
        momentum = self.momenta[index].mul_(self._outer.momentum).add_(movement)
        start.sub_(movement.add_(momentum, alpha=self._outer.momentum), alpha=self._outer.lr)


class RankZeros(WholeOptimizer):
    """In checkpoints a training of another kind finds rank 0's optimizer; the others' are kept
    by rank.
    """

    def __init__(self, updated: Updated) -> None:
        super().__init__(updated.reducer, updated.optimizer)
        self._first = updated.everyone.rank == 0

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[list[TensorPiece], list[TensorPiece]]:
        return [], super().pieces(name_of)[0] if self._first else []


class LocalSteps(Replicated):
    """An update of this rank alone, and the meetings, so many steps after the last one of all
    fragments.

    Every rank makes the same steps in the same order, also where it has nothing to learn from.
    """

    name = "local steps"

    def __init__(self, updated: Updated, every: int, outer: Outer) -> None:
        super().__init__(updated)
        reducer = updated.reducer
        assert isinstance(reducer.reduction, Alone)
        self.optimizer = RankZeros(updated)
        self._everyone, self._every, self._outer = updated.everyone, every, outer
        self._reducer, self._meeting = reducer, reducer.reduction.meeting
        self._buffers = MeetingBuffers(updated.model, self._everyone)
        self.taken = 0
        """Local steps so far."""
        self._parted_at = 0  # their number at the last meeting of all fragments, without overlap
        self._flights: list[_Flight] = []
        # and keep that order, which is the same on all ranks: nothing leaves early
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
            # the gradients of the steps that are computed meanwhile need their place
            memory = self._meeting.memory(reducer.layout)
            self._moving = [
                Bucket(plan, reducer.parameters, room)
                for plan, room in zip(reducer.layout.buckets, memory, strict=True)
            ]

    @torch.no_grad()
    def _copied(self, bucket: Bucket) -> Tensor:
        """The parameters of a bucket, laid as it is."""
        flat = torch.zeros_like(bucket.sum)
        for _, parameter, place in places(flat, bucket):
            place.copy_(parameter)
        return flat

    def follow(self) -> None:
        """Layers were added, frozen or unfrozen. Every rank calls it in the same step."""
        if self._reducer.layouts == self._layouts:
            return
        if self._reducer.generation == self._generation:
            # laid anew for the same parameters: only ever before the first step
            self._lay()
            return
        if not self.together:
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
        """The inner optimizers' states differ from meeting to meeting: they are no part of it."""
        return [
            (f"outer/momentum/{name}", value)
            for name, value in self._named(self._step.momenta).items()
        ]

    # -- meetings ---------------------------------------------------------------------------------

    @property
    def together(self) -> bool:
        """Whether all ranks hold the same model: nobody has taken a step since the last meeting
        of all fragments. The same on all ranks.
        """
        return not self._flights and self._parted_at == self.taken

    def meet_if_due(self, ended: EndedWindow) -> bool:
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

    def meet(self, *, stop: bool = False) -> bool:
        """All fragments now, where somebody has taken a step since. Every rank calls it; whether
        it was heard that one of them asks to stop.
        """
        if self.together:
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
        """Start the sum of a fragment's movements; with the last one the buffers meet. Whether
        somebody asks to stop.
        """
        buffers = fragment == len(self._fragments) - 1
        with status.inside("reduce"):
            weight = self._since[fragment]
            facts = torch.tensor(
                [weight, float(stop), *self._buffers.changed(buffers)], dtype=torch.float64
            )
            self._everyone.host.all_reduce(
                facts, place=f"for the facts of a meeting after local step {self.taken}"
            ).wait()
            total, stops, *changed = facts.tolist()
            works = []
            for index in self._fragments[fragment]:
                bucket = self._moving[index]
                self._movement(bucket, self._step.starts[index], weight)
                works.append(self._meeting.start(bucket))
            self._flights.append(_Flight(fragment, lands, total, works))
            self._since[fragment] = 0.0
            if buffers:
                self._buffers.meet(changed, total)
        return bool(stops > 0)

    def _movement(self, bucket: Bucket, start: Tensor, weight: float) -> None:
        """Into the bucket: how far its parameters have moved, times what moved them."""
        bucket.sum.zero_()
        if weight == 0:
            return
        for (_, parameter, place), view in zip(places(start, bucket), bucket.views, strict=True):
            torch.sub(place, parameter, out=view)
        bucket.sum.mul_(weight)

    @torch.no_grad()
    def _land(self, due: Callable[[_Flight], bool], *, mixed: bool = True) -> None:
        """Make use of the sums that have arrived, or are waited for."""
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
        """The model that all ranks agree on: as it was at the last meeting, where some have gone
        on since.
        """
        if self.together:
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
        if not self.together:
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
        """A rank that was there goes on from its own replica; a new one from where all started.
        Nothing is kept before local steps begin.
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
        """The parameters' places in flat tensors that are laid as the buckets."""
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
    """Buckets of these sizes as `count` runs of about equal size, fewer where there are fewer
    buckets. None is empty.
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
