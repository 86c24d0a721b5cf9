"""Uneven inputs with the wrapper: ranks that have run out shadow the others, step by step, until all have run out.

Before each forward that will be reduced, every rank says whether it still has inputs; the sum tells all of them whether to go on and,
if asked, what to divide by. A rank that has run out takes the same part in every collective, with zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lockstep.collectives.group import Group
from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.replicate import replicate
from lockstep.gradients.torch_hook import TorchHook


class Uneven:
    """One `join` block on one rank."""

    def __init__(self, group: Group, reducer: Reducer, divide_by_all: bool, stop_early: bool) -> None:
        self._group, self._reducer = group, reducer
        self._divide_by_all, self._stop_early = divide_by_all, stop_early
        self._before = reducer.scale
        self.steps = 0

    def step(self) -> int:
        """Say that this rank has inputs; returns how many ranks have."""
        self.steps += 1
        return self._count(1)

    def _count(self, mine: int) -> int:
        count = torch.tensor(mine, device=self._reducer.parameters[0].device)
        self._group.all_reduce(count, place="for join()").wait()
        active = int(count)
        if active and not isinstance(self._reducer.reduction, TorchHook):  # a hook divides by itself
            self._reducer.scale = 1 / (self._group.size if self._divide_by_all else active)
        if self._stop_early and 0 < active < self._group.size:
            raise UsageError(
                f"{self._group.size - active} of {self._group.size} ranks have run out of inputs after {self.steps} steps on this rank"
            )
        return active

    def shadow(self, before_forward: Callable[[int], None], finish: Callable[[], None]) -> None:
        """This rank has run out: take part with zeros until all have."""
        while active := self._count(0):
            for parameter in self._reducer.parameters:
                parameter.grad = None
            before_forward(active)
            finish()

    def settle(self, module: nn.Module) -> None:
        """Give all ranks the model of the first rank that took the most steps; the others' weights have stood still meanwhile."""
        steps = self._group.all_gather(torch.tensor(self.steps, device=self._reducer.parameters[0].device), place="for join()")
        if bool((steps != steps[0]).any()):
            replicate(module, self._group, self._reducer.ignored, root=int(steps.argmax()))

    def end(self) -> None:
        """Divide as before again."""
        self._reducer.scale = self._before
