"""The replicated update: every rank applies the whole update to its whole copy, as usual in data
parallelism. The gradients are equal on all ranks, so norm, finite check and step need no message.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.updates.divide_clip_step import OwnStep
from lockstep.updates.norm_and_clip import InBuckets
from lockstep.updates.optimizer_state import OptimizerState, WholeOptimizer, whole_pieces
from lockstep.updates.update import Updated


class Replicated(OwnStep):
    """Every rank holds the whole optimizer."""

    name = "replicated"
    follows = False

    def __init__(self, updated: Updated) -> None:
        super().__init__(updated, InBuckets(updated.reducer))
        self.optimizer: OptimizerState = WholeOptimizer(updated.reducer, updated.optimizer)

    def replicated(self) -> Sequence[tuple[str, Tensor]]:
        reducer = self._updated.reducer
        names = dict(zip(map(id, reducer.parameters), reducer.names, strict=True))
        pieces = whole_pieces(
            self._updated.optimizer, reducer.parameters, lambda parameter: names[id(parameter)]
        )
        return [(piece.name, piece.data) for piece in pieces]
