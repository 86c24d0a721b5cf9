"""Every rank applies the whole update to its whole copy: the form of data parallelism that
everybody knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.gradients.reducer import Reducer
from lockstep.updates.applied import Applied
from lockstep.updates.norm import block_sums
from lockstep.updates.optimizer_state import OptimizerState, WholeOptimizer, whole_pieces
from lockstep.updates.stepping import Stepping
from lockstep.updates.update import OwnStep, Updated


class Replicated(OwnStep):
    """The gradients are equal on all ranks, so norm, finite check and step need no further
    message.
    """

    name = "replicated"

    def __init__(self, updated: Updated) -> None:
        super().__init__(updated)
        self.optimizer: OptimizerState = WholeOptimizer(updated.reducer, updated.optimizer)
        self._stepping = Stepping(updated, InBuckets(updated.reducer))

    def follow(self) -> None:
        """Nothing here depends on the layout."""

    def replicated(self) -> Sequence[tuple[str, Tensor]]:
        reducer = self._updated.reducer
        names = {
            id(each): name for name, each in zip(reducer.names, reducer.parameters, strict=True)
        }
        pieces = whole_pieces(
            self._updated.optimizer, reducer.parameters, lambda parameter: names[id(parameter)]
        )
        return [(piece.name, piece.data) for piece in pieces]

    def apply(self, divisor: float) -> Applied:
        return self._stepping.apply(divisor)


class InBuckets:
    """A reducer's sums (norm.Summed), which every rank has."""

    spread: Sequence[Group] = ()

    def __init__(self, reducer: Reducer) -> None:
        self._reducer, self.device = reducer, reducer.parameters[0].device

    def flats(self) -> list[Tensor]:
        return [bucket.sum for bucket in self._reducer.buckets]

    def blocks(self) -> list[Tensor]:
        return [block_sums(flat) for flat in self.flats()]

    def named(self) -> Iterable[tuple[str, Tensor]]:
        reducer = self._reducer
        return [
            (name, each.grad)
            for name, each in zip(reducer.names, reducer.parameters, strict=True)
            if each.grad is not None
        ]
