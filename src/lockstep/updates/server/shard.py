"""One rank's part of the parameters at a server: it gives them out, adds up gradients, and steps
the user's optimizer, window by window.

The server's parameters lie apart from the model's, whose values are as old as the last pull. They
are cut into slices and pieces like those of the sharded update, among the first ranks (the owners),
in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.collectives.group import Group
from lockstep.updates.norm import block_sums
from lockstep.updates.shards import Shards, State, flat_view


class Masters(Shards):
    """The slices of this rank, possibly none, and views of them: the pieces that its optimizer
    treats as parameters.
    """

    def _lay(self) -> list[Tensor]:
        slices, buckets = self.of(self._group.rank), self._layout.buckets
        self.flats: Sequence[Tensor] = [
            torch.zeros(len(mine), dtype=plan.dtype)
            for mine, plan in zip(slices, buckets, strict=True)
        ]
        spans = {
            span.parameter: (plan.index, span.start) for plan in buckets for span in plan.spans
        }
        # for each piece: the bucket, and the start and stop in its slice
        self._in_flats: list[tuple[int, int, int]] = []
        laid = []
        for piece in self.pieces:
            index, first = spans[piece.parameter]
            start = first + piece.start - slices[index].start
            stop = start + piece.stop - piece.start
            parameter = self.parameters[piece.parameter]
            laid.append(self.flats[index][start:stop])
            laid[-1].copy_(flat_view(parameter)[piece.start : piece.stop])
            self._in_flats.append((index, start, stop))
        return laid

    def share(self, rank: int) -> float:
        """The share of all elements that a rank has."""
        total = sum(plan.numel for plan in self._layout.buckets)
        return sum(map(len, self.of(rank))) / total

    def give(self, sums: Sequence[Tensor]) -> None:
        """Give the pieces their gradients, from flat tensors like `flats`."""
        for view, (index, start, stop) in zip(self.views, self._in_flats, strict=True):
            view.grad = sums[index][start:stop]

    def move(self, group: Group) -> None:
        """Continue in another group, in which the owners have the same numbers."""
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
    """The sum of one window's gradients that were computed on parameters of one version."""

    flats: list[Tensor]
    weight: float = 0.0


@dataclass(slots=True)
class _WindowSums:
    """The gradients of one window that have arrived."""

    sums: dict[int, _Sum] = field(default_factory=dict)
    """By version; all under 0 if the version does not matter."""
    have: set[int] = field(default_factory=set)
    whole: list[Tensor] | None = None
    rate: float = 1.0


class ServerShard:
    """This rank's shard. The threads of many ranks call it. `stepped` is called after every step of
    the optimizer, while no other thread uses the optimizer.
    """

    def __init__(
        self, masters: Masters, optimizer: Optimizer, *, by_age: bool, stepped: Callable[[], None]
    ) -> None:
        self._masters = masters
        self._optimizer = optimizer
        self._by_age = by_age
        self._stepped = stepped
        self._lock = Lock()
        self._windows: dict[int, _WindowSums] = {}
        self._snapshot: list[Tensor] | None = None
        self.version = 0
        """How many windows were applied or left out."""
        self.steps = 0
        """Windows in which the optimizer stepped."""
        self.rates: dict[int, float] = {}
        """By window, the first group's learning rate when the window was applied."""

    def place(self, masters: Masters) -> None:
        """Hold these parameters from now on. No window may be open."""
        with self._lock:
            assert not self._windows, "a shard is cut between synchronizations"
            self._masters, self._snapshot = masters, None

    def like(self) -> list[Tensor]:
        """Allocate memory for what a worker pushes."""
        return [torch.empty_like(flat) for flat in self._masters.flats if flat.numel()]

    def pull(self) -> tuple[int, int, list[Tensor]]:
        """Return the version, the steps that the optimizer has taken, and a snapshot of the
        parameters, which nobody changes.
        """
        with self._lock:
            if self._snapshot is None:
                self._snapshot = [flat.clone() for flat in self._masters.flats if flat.numel()]
            return self.version, self.steps, self._snapshot

    def push(
        self, window: int, number: int, version: int, weight: float, gradients: Sequence[Tensor]
    ) -> int:
        """Add a draw's gradients, once. A draw may come again, from the rank that computed it in
        place of a dead one. Return the version.
        """
        with self._lock:
            found = self._windows.setdefault(window, _WindowSums())
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
        """Return the sum of squares of this shard's part of a window's gradient."""
        with self._lock:
            return sum(block_sums(flat).double().sum().item() for flat in self._whole(window))

    def apply(self, window: int, divisor: float, *, skip: bool) -> int:
        """Step on a window's gradient divided by `divisor`, or drop it. A second call does nothing:
        the rank that called first may have died during the call.
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
        """Return a window's gradient. If weighted by age, a sum that is `a` versions old counts
        1 / (1 + a), relative to the mean; the mean factor scales the learning rate instead.
        """
        window = self._windows[number]
        if window.whole is None:
            if self._by_age:
                self._by_ages(window)
            else:
                (only,) = window.sums.values()
                window.whole = only.flats
        return window.whole or []

    def _by_ages(self, window: _WindowSums) -> None:
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
