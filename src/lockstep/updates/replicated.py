"""Every rank applies the whole update to its whole copy: the form of data parallelism that everybody knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.checkpoints.pieces import Piece
from lockstep.gradients.reducer import Reducer
from lockstep.updates.applied import Applied
from lockstep.updates.held import SplitNorm
from lockstep.updates.norm import gradient_norm
from lockstep.updates.stepping import Stepping
from lockstep.updates.update import Update, check_belongs


class Replicated(Update):
    """The gradients are equal on all ranks, so norm, finite check and step need no further message."""

    name = "replicated"

    def __init__(self, norm: SplitNorm | None = None) -> None:
        """`norm`: where a rank holds a part of the model only."""
        self._split_norm = norm

    def bind(self, reducer: Reducer, optimizer: Optimizer) -> None:
        check_belongs(reducer, optimizer)
        self._optimizer = optimizer
        self._reducer = reducer
        self._stepping = Stepping(optimizer, reducer.parameters[0].device, lambda: sums_of(reducer), self._norm)

    def _norm(self, divisor: float) -> Tensor:
        reducer = self._reducer
        if self._split_norm is None:
            return gradient_norm(sums_of(reducer)) / divisor
        gradients = [(name, each.grad) for name, each in zip(reducer.names, reducer.parameters, strict=True) if each.grad is not None]
        return self._split_norm(gradients, divisor, reducer.parameters[0].device)

    def follow(self) -> None:
        """Nothing here depends on the layout."""

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(dict(state))

    def wholes(self) -> Sequence[Sequence[Tensor]]:
        return [group["params"] for group in self._optimizer.param_groups]

    def pieces(self, name_of: Callable[[Tensor], str]) -> tuple[list[Piece], list[Piece]]:
        return whole_pieces(self._optimizer, [each for members in self.wholes() for each in members], name_of), []

    def replicated(self) -> Sequence[tuple[str, Tensor]]:
        names = {id(each): name for name, each in zip(self._reducer.names, self._reducer.parameters, strict=True)}
        pieces = whole_pieces(self._optimizer, self._reducer.parameters, lambda parameter: names[id(parameter)])
        return [(piece.name, piece.data) for piece in pieces]

    def apply(self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler | None) -> Applied:
        return self._stepping.apply(divisor, clip, scaler)


def whole_pieces(optimizer: Optimizer, parameters: Sequence[Tensor], name_of: Callable[[Tensor], str]) -> list[Piece]:
    """What the optimizer keeps in tensors for these parameters."""
    return [
        Piece(f"{state}/{name_of(parameter)}", value)
        for parameter in parameters
        for state, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]


def sums_of(reducer: Reducer) -> list[Tensor]:
    return [bucket.sum for bucket in reducer.buckets]
