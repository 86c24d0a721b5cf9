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
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lockstep.collectives.work import Work
from lockstep.config.parallelism import Outer
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.facts import Facts
from lockstep.gradients.reductions import Alone
from lockstep.gradients.saved_state import TensorPiece
from lockstep.runtime import status
from lockstep.updates.optimizer_state import WholeOptimizer, whole_pieces
from lockstep.updates.replicated import Replicated
from lockstep.updates.shards import parameter_views
from lockstep.updates.synchronized_buffers import SynchronizedBuffers
from lockstep.updates.update import EndedWindow, Updated

# with overlap, the share of the replica's own values that stays after a synchronization
_MIXED = 0.5


@dataclass(slots=True)
class _PendingSum:
    """A fragment whose movements are being summed."""

    fragment: int
    due: int
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
        self.momenta: list[Tensor] = []
        if outer.kind == "nesterov":
            self.momenta = [torch.zeros_like(start) for start in starts]

    @torch.no_grad()
    def move(self, index: int, movement: Tensor) -> None:
        """Move start number `index` by the mean movement, whose tensor is overwritten."""
        start = self.starts[index]
        if not self.momenta:
            start.sub_(movement)
            return
        momentum = self.momenta[index].mul_(self._outer.momentum).add_(movement)
        start.sub_(movement.add_(momentum, alpha=self._outer.momentum), alpha=self._outer.lr)


class RankZeroOptimizer(WholeOptimizer):
    """The optimizer state in checkpoints: rank 0's in the place where other updates look for it,
    those of the other ranks by rank.
    """

    def __init__(self, updated: Updated) -> None:
        super().__init__(updated.reducer, updated.optimizer)
        self._first = updated.everyone.rank == 0

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[list[TensorPiece], list[TensorPiece]]:
        common, _ = super().pieces(name_of)
        return [], common if self._first else []


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
        self.optimizer = RankZeroOptimizer(updated)
        self._everyone = updated.everyone
        self._every = every
        self._outer = outer
        self._reducer = reducer
        self._reduction = reducer.reduction.over_all_ranks
        self._buffers = SynchronizedBuffers(updated.model, self._everyone)
        self.taken = 0
        """Local steps so far."""
        # `taken` at the last synchronization of all fragments, without overlap
        self._synchronized_at = 0
        self._pending: list[_PendingSum] = []
        # fix the order of buckets, the same on all ranks: no bucket leaves early
        reducer.lay(reducer.order)
        self._lay()

    def _lay(self) -> None:
        reducer = self._reducer
        self._layouts = reducer.layouts
        self._generation = reducer.generation
        self._names = reducer.names
        self._buckets = list(reducer.buckets)
        self._step = OuterStep(self._outer, [self._copied(bucket) for bucket in self._buckets])
        sizes = [bucket.sum.numel() for bucket in self._buckets]
        self._fragments = fragments_of(sizes, self._outer.fragments)
        self._since = [0.0] * len(self._fragments)
        self._moving = self._buckets
        if self._outer.overlap:
            # separate memory: the next steps' gradients need the buckets while sums travel
            memory = self._reduction.memory(reducer.layout)
            self._moving = [
                Bucket(plan, reducer.parameters, flat)
                for plan, flat in zip(reducer.layout.buckets, memory, strict=True)
            ]

    @torch.no_grad()
    def _copied(self, bucket: Bucket) -> Tensor:
        """Return a copy of a bucket's parameters, with the bucket's layout."""
        flat = torch.zeros_like(bucket.sum)
        for _, parameter, view in parameter_views(flat, bucket):
            view.copy_(parameter)
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
        _copy_into(self._named(self._step.momenta), momenta)

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
        return not self._pending and self._synchronized_at == self.taken

    def end(self, steps: int, facts: Facts, divisor: float) -> EndedWindow:
        ended = super().end(steps, facts, divisor)
        assert ended.outcome is not None
        weight = ended.weight if ended.outcome.applied else 0.0
        self.taken += 1
        self._since = [since + weight for since in self._since]
        self._buffers.learned(weight)
        self._apply_sums(lambda pending: pending.due <= self.taken)
        overlap = self._outer.overlap
        count = len(self._fragments)
        position = (self.taken - self._synchronized_at) % self._every
        stop = False
        for fragment in range(count):
            if position != fragment_offset(fragment, count, self._every):
                continue
            stop = self._send(fragment, self.taken + overlap, stop=ended.stop)
            if not overlap:
                self._apply_sums(lambda pending: True)
                if count == 1:
                    self._synchronized_at = self.taken
        return replace(ended, stop=stop, synchronized=self.synchronized)

    def synchronize(self, *, stop: bool = False) -> bool:
        """Synchronize all fragments now, if any rank has taken a step since. Every rank calls it.
        Return whether one of them asks to stop.
        """
        if self.synchronized:
            return False
        self._apply_sums(lambda pending: True)
        any_stop = False
        for fragment in range(len(self._fragments)):
            any_stop = self._send(fragment, self.taken, stop=stop)
            self._apply_sums(lambda pending: True, mixed=False)
        self._synchronized_at = self.taken
        return any_stop

    @torch.no_grad()
    def _send(self, fragment: int, due: int, *, stop: bool) -> bool:
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
            self._pending.append(_PendingSum(fragment, due, total, works))
            self._since[fragment] = 0.0
            if buffers:
                self._buffers.synchronize(changed, total)
        return bool(stops > 0)

    def _movement(self, bucket: Bucket, start: Tensor, weight: float) -> None:
        """Write into the bucket how far its parameters have moved, times the weight."""
        bucket.sum.zero_()
        if weight == 0:
            return
        starts = parameter_views(start, bucket)
        for (_, parameter, before), movement in zip(starts, bucket.views, strict=True):
            torch.sub(before, parameter, out=movement)
        bucket.sum.mul_(weight)

    @torch.no_grad()
    def _apply_sums(self, due: Callable[[_PendingSum], bool], *, mixed: bool = True) -> None:
        """Wait for the sums that are due, and apply them."""
        mixed = mixed and self._outer.overlap > 0
        for pending in [pending for pending in self._pending if due(pending)]:
            self._pending.remove(pending)
            with status.inside("reduce"):
                for work in pending.works:
                    work.wait()
            for index in self._fragments[pending.fragment]:
                bucket = self._moving[index]
                if pending.weight > 0:
                    self._step.move(index, bucket.sum.div_(pending.weight))
                for _, parameter, start in parameter_views(self._step.starts[index], bucket):
                    if mixed:
                        parameter.lerp_(start, 1 - _MIXED)
                    else:
                        parameter.copy_(start)
                bucket.sum.zero_()

    # -- what a checkpoint keeps ------------------------------------------------------------------

    def synchronized_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers of the last synchronization, if any rank has taken steps
        since. All ranks agree on them, and not on the model's.
        """
        if self.synchronized:
            return {}
        return {**self._named(self._step.starts), **self._buffers.starts()}

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        common = dict(self.replicated())
        common["outer/taken"] = torch.tensor([self.taken, self._synchronized_at])
        own = {}
        for pending in self._pending:  # the sums are the same on all ranks
            for work in pending.works:
                work.wait()
            pending.works = []
            common[f"outer/flight/{pending.fragment}"] = torch.tensor(
                [pending.due, pending.weight], dtype=torch.float64
            )
            for index in self._fragments[pending.fragment]:
                bucket = self._moving[index]
                for name, _, total in parameter_views(bucket.sum, bucket):
                    common[f"outer/flying/{name}"] = total
        if not self.synchronized:
            for name, parameter in self._parameters:
                own[f"replica/{name}"] = parameter.detach()
            for name, buffer in self._buffers.now().items():
                own[f"buffer/{name}"] = buffer
            own["since"] = torch.tensor([*self._since, self._buffers.since], dtype=torch.float64)
        if self._everyone.rank > 0:
            names = {id(parameter): name for name, parameter in self._parameters}
            inner = whole_pieces(
                self._updated.optimizer,
                self._reducer.parameters,
                lambda parameter: names[id(parameter)],
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
        counts = common.get("outer/taken", torch.zeros(2))
        self.taken, self._synchronized_at = map(int, counts.tolist())
        for index, bucket in enumerate(self._reducer.buckets):
            self._step.starts[index] = self._copied(bucket)
        self._buffers.restart()
        _copy_into(self._named(self._step.momenta), _under(common, "outer/momentum/"))
        self._pending = []
        for fragment, numbers in _under(common, "outer/flight/").items():
            due, weight = numbers.tolist()
            self._pending.append(_PendingSum(int(fragment), int(due), weight, []))
        sums = self._named([bucket.sum for bucket in self._moving])
        _copy_into(sums, _under(common, "outer/flying/"))
        rank = self._everyone.rank
        own = by_rank[rank] if rank < len(by_rank) else {}
        parameters = dict(self._parameters)
        _copy_into(parameters, _under(own, "replica/"))
        self._buffers.take(_under(own, "buffer/"))
        since = own.get("since")
        if since is not None and len(since) == len(self._since) + 1:
            *self._since, self._buffers.since = since.tolist()
        for key, value in _under(own, "inner/").items():
            state, _, name = key.partition("/")
            if name in parameters:
                self._updated.optimizer.state[parameters[name]][state].copy_(value)

    @property
    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._reducer.names, self._reducer.parameters, strict=True))

    def _named(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parameters' views, by name, of flat tensors with the layout of the buckets."""
        views = {}
        for flat, bucket in zip(flats, self._buckets, strict=bool(flats)):
            for name, _, view in parameter_views(flat, bucket):
                views[name] = view
        return views


def _copy_into(views: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy each value into the view of the same name, if there is one."""
    for name, view in views.items():
        if name in values:
            view.copy_(values[name])


def fragment_offset(fragment: int, count: int, every: int) -> int:
    """Return after how many of `every` steps a fragment of `count` synchronizes. With 2 fragments
    and 8 steps: the first after 4, the second after 8, which is 0 of the next 8.
    """
    return (fragment + 1) * every // count % every


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide buckets of these sizes into at most `count` runs of about equal size. No run is empty;
    there are fewer runs than `count` if there are fewer buckets.
    """
    total = sum(sizes)
    before = 0
    runs: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        middle = before + size / 2
        run = min(count - 1, int(count * middle / total))
        runs.setdefault(run, []).append(index)
        before += size
    return list(runs.values())


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
