"""Uneven inputs with the wrapper: ranks that have run out shadow the others, step by step, until
all have run out.

torch's `Join` asks who still has inputs and calls the hook of what takes part: this one, a
ShardedOptimizer's, a user's own. Before each forward that will be reduced the wrapper counts the
ranks that have inputs, which is what its mean may be over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from lockstep.collectives.group import Group
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.torch_hook import TorchHook


class Uneven(JoinHook):
    """One `join` block on one rank.

    `shadow(reduced)` does what the wrapper does for a step, whose backward is reduced or not,
    without a forward and a backward; `settle(root)` gives all ranks the model of one of them.
    """

    def __init__(
        self,
        group: Group,
        reducer: Reducer,
        *,
        shadow: Callable[[bool], None],
        settle: Callable[[int], None],
        divide_by_all: bool,
    ) -> None:
        self._group, self._reducer = group, reducer
        self._shadow, self._settle = shadow, settle
        self._divide_by_all = divide_by_all
        self._before = reducer.door.scale
        self._own: list[Tensor | None] | None = None
        self.active = group.size
        """Ranks that have inputs for the step at hand."""

    def count(self, mine: int, reduced: bool) -> bool:
        """Say whether this rank has inputs, and whether its backward will be reduced; returns
        what those say that have. Sets the divisor.
        """
        counts = torch.tensor([mine, int(reduced)], device=self._reducer.parameters[0].device)
        self._group.all_reduce(counts, place="for join()").wait()
        self.active, reducing = counts.tolist()
        if not isinstance(self._reducer.reduction, TorchHook):  # a hook divides by itself
            self._reducer.door.scale = 1 / (
                self._group.size if self._divide_by_all else self.active
            )
        return bool(reducing)

    def root(self, mine: bool) -> int:
        """The highest of the ranks that say `mine`."""
        root = torch.tensor(
            self._group.rank if mine else -1, device=self._reducer.parameters[0].device
        )
        self._group.all_reduce(root, "max", place="for join()").wait()
        return int(root)

    def main_hook(self) -> None:
        """This rank has run out, and others have not: take part in their step with zeros. Its
        own gradients are put aside.
        """
        if self._own is None:
            self._own = [
                None if each.grad is None else each.grad.clone()
                for each in self._reducer.parameters
            ]
        for parameter in self._reducer.parameters:
            parameter.grad = None
        self._shadow(self.count(0, False))

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have run out: every rank gets the model of one that came last, and its own
        gradients back.
        """
        self._settle(self.root(is_last_joiner))
        if self._own is not None:
            for parameter, gradient in zip(self._reducer.parameters, self._own, strict=True):
                parameter.grad = gradient
        self.end()

    def end(self) -> None:
        """Divide as before again."""
        self._reducer.door.scale = self._before
