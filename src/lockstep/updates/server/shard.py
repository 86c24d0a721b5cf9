"""One rank's part of the parameters: gives out what they are, adds up gradients, and steps the
user's optimizer, window by window.

The parameters as a server keeps them lie apart from the model's, whose values are as old as the
last pull: in slices and pieces like those of the sharded update, among the first so many ranks, in
the memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.collectives.group import Group
from lockstep.collectives.slices import slice_of
from lockstep.gradients.layout import Layout
from lockstep.updates.norm import block_sums
from lockstep.updates.shards import Shards, State, flat_view, pieces_of


class Masters(Shards):
    """The slices of this rank, which may be none, and the pieces that its optimizer takes for
    parameters: views of them.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout, group: Group, owners: int
    ) -> None:
        self.parameters, self._layout, self._group, self._shared = parameters, layout, group, None
        self.owners = owners
        self.all_pieces = pieces_of(layout, owners)
        self.pieces = [piece for piece in self.all_pieces if piece.rank == group.rank]
        self.someone_has_none = len({piece.rank for piece in self.all_pieces}) < owners
        self.slices_here = self.of(group.rank)
        """By bucket: which of its elements."""
        self.flats = [
            torch.zeros(len(mine), dtype=plan.dtype)
            for mine, plan in zip(self.slices_here, layout.buckets, strict=True)
        ]
        # of each piece: bucket, and elements of its slice
        self.places: list[tuple[int, int, int]] = []
        spans = {
            span.parameter: (plan.index, span.start)
            for plan in layout.buckets
            for span in plan.spans
        }
        self.views, self._mine = [], {}
        for piece in self.pieces:
            index, first = spans[piece.parameter]
            start = first + piece.start - self.slices_here[index].start
            place = self.flats[index][start : start + piece.stop - piece.start]
            place.copy_(flat_view(parameters[piece.parameter])[piece.start : piece.stop])
            self.places.append((index, start, start + len(place)))
            self.views.append(nn.Parameter(place))
            self._mine.setdefault(id(parameters[piece.parameter]), []).append(self.views[-1])

    def of(self, rank: int) -> list[range]:
        """The elements of each bucket that are a rank's."""
        if rank >= self.owners:
            return [range(0) for _ in self._layout.buckets]
        return [slice_of(plan.numel, rank, self.owners) for plan in self._layout.buckets]

    def share(self, rank: int) -> float:
        """Of all elements, how many are a rank's."""
        total = sum(plan.numel for plan in self._layout.buckets)
        return sum(map(len, self.of(rank))) / total

    def give(self, sums: Sequence[Tensor]) -> None:
        """Gradients to the pieces: flat tensors like `flats`."""
        for view, (index, start, stop) in zip(self.views, self.places, strict=True):
            view.grad = sums[index][start:stop]

    def move(self, group: Group) -> None:
        """The same owners are among other ranks now, with the same numbers."""
        self._group = group

    def cut_state(self, optimizer: Optimizer, number: int, whole: State) -> None:
        super().cut_state(optimizer, number, whole)
        for piece, view in zip(self.pieces, self.views, strict=True):
            if piece.parameter == number:
                state = optimizer.state[view]
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = value.to(view.device)


@dataclass(slots=True)
class _Sum:
    """Gradients of one window that were computed on parameters of one age."""

    flats: list[Tensor]
    weight: float = 0.0


@dataclass(slots=True)
class _Window:
    """What has come of one."""

    sums: dict[int, _Sum] = field(default_factory=dict)
    """By version; under 0 all of them, where their age does not matter."""
    have: set[int] = field(default_factory=set)
    whole: list[Tensor] | None = None
    rate: float = 1.0


class ServerShard:
    """Called by the threads of many ranks. `stepped` is called after every window that was
    applied, with its optimizer untouched by others.
    """

    def __init__(
        self, masters: Masters, optimizer: Optimizer, *, by_age: bool, stepped: Callable[[], None]
    ) -> None:
        self._masters = masters
        self._optimizer = optimizer
        self._by_age = by_age
        self._stepped = stepped
        self._lock = Lock()
        self._windows: dict[int, _Window] = {}
        self._snapshot: list[Tensor] | None = None
        self.version = 0
        """Windows that were applied."""
        self.steps = 0
        """Windows in which the optimizer stepped."""
        self.rates: dict[int, float] = {}
        """By window: the learning rate of the first group with which it was applied."""

    def place(self, masters: Masters) -> None:
        """Hold these from now on: nothing is under way."""
        with self._lock:
            assert not self._windows, "a shard is cut between meetings"
            self._masters, self._snapshot = masters, None

    def like(self) -> list[Tensor]:
        """Room for what a worker pushes."""
        return [torch.empty_like(flat) for flat in self._masters.flats if flat.numel()]

    def pull(self) -> tuple[int, int, list[Tensor]]:
        """The version, the steps that the optimizer has taken, and the parameters, which nobody
        changes any more.
        """
        with self._lock:
            if self._snapshot is None:
                self._snapshot = [flat.clone() for flat in self._masters.flats if flat.numel()]
            return self.version, self.steps, self._snapshot

    def push(
        self, window: int, number: int, version: int, weight: float, gradients: Sequence[Tensor]
    ) -> int:
        """Add a draw's, once: it may come again, from whoever computed it in the place of a rank
        that has died. The version now.
        """
        with self._lock:
            found = self._windows.setdefault(window, _Window())
            if number not in found.have:
                found.have.add(number)
                key = version if self._by_age else 0
                if key in found.sums:
                    for mine, gradient in zip(found.sums[key].flats, gradients, strict=True):
                        mine.add_(gradient)
                else:
                    found.sums[key] = _Sum([gradient.clone() for gradient in gradients])
                found.sums[key].weight += weight
            return self.version

    def squares(self, window: int) -> float:
        """The sum of squares of this shard's part of a window's gradient."""
        with self._lock:
            return sum(block_sums(flat).double().sum().item() for flat in self._whole(window))

    def apply(self, window: int, divisor: float, *, skip: bool) -> int:
        """Step on a window's gradient divided by `divisor`, or forget it. A second time does
        nothing: who asked first may have died of it.
        """
        with self._lock:
            if window not in self._windows:
                return self.version
            gradient, rate = self._whole(window), self._windows.pop(window).rate
            self.version += 1
            self.rates[window] = self._rate()
            if not skip:
                self._step(gradient, divisor, rate)
            return self.version

    def forget_rates(self) -> None:
        with self._lock:
            self.rates.clear()

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def _whole(self, number: int) -> list[Tensor]:
        """A window's gradient. By age, a sum that is `a` versions old counts 1 / (1 + a); what
        they count on average is the rate's affair.
        """
        window = self._windows[number]
        if window.whole is None:
            if self._by_age:
                self._by_ages(window)
            else:
                (only,) = window.sums.values()
                window.whole = only.flats
        return window.whole or []

    def _by_ages(self, window: _Window) -> None:
        factors = {version: 1 / (1 + max(0, self.version - version)) for version in window.sums}
        total = sum(each.weight for each in window.sums.values())
        if total > 0:
            window.rate = (
                sum(factors[version] * each.weight for version, each in window.sums.items()) / total
            )
        window.whole = []
        for flats in zip(*(each.flats for each in window.sums.values()), strict=True):
            joined = torch.zeros_like(flats[0])
            for version, flat in zip(window.sums, flats, strict=True):
                joined.add_(flat, alpha=factors[version] / window.rate)
            window.whole.append(joined)

    @torch.no_grad()
    def _step(self, gradient: list[Tensor], divisor: float, rate: float) -> None:
        filled = iter(gradient)
        sums = [
            next(filled).div_(divisor) if flat.numel() else flat for flat in self._masters.flats
        ]
        self._masters.give(sums)
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            if rate != 1:
                for group in groups:
                    group["lr"] = group["lr"] * rate
            self._optimizer.step()
        finally:
            for group, before in zip(groups, rates, strict=True):
                group["lr"] = before
        self._snapshot = None
        self.steps += 1
        self._stepped()
