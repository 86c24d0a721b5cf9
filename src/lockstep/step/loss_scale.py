"""Loss scaling: the factor of the losses with fp16."""

from __future__ import annotations

import math
from collections.abc import Sized

import torch
from torch import Tensor
from torch.amp import GradScaler

from lockstep.collectives.group import Group
from lockstep.data.windows import Window


class LossScale:
    """The factor of the losses with fp16: a power of two near 1 / the step's weight. Without it,
    sums over a large batch overflow where means would not. The user's GradScaler multiplies by a
    scale of its own.

    A power of two adds no rounding, and all ranks use the same. For a Loader's window the number of
    samples of a step gives the weight. For other windows it is the weight of the step before; in
    the first step the ranks exchange their expected weights at the first backward.
    """

    def __init__(self, scaler: GradScaler | None, device: torch.device) -> None:
        self._wanted = scaler is not None and scaler.is_enabled()
        self._device = device
        self._weight = 0.0
        self._micro_batches = 1
        if scaler is not None and self._wanted:
            # the scaler creates its state at the first loss, and a rank may have no loss
            scaler.scale(torch.zeros((), device=device))

    def begin(self, window: object) -> float | None:
        """Return the factor for a window; None if the ranks must agree on it first."""
        if not self._wanted:
            return 1.0
        self._micro_batches = len(window) if isinstance(window, Sized) else 1
        weight = self._weight
        if isinstance(window, Window):
            weight = window.cut.micro_batch * window.cut.slots
        return _near_one_over(weight) if weight else None

    def agree(self, group: Group, weight: float | Tensor) -> float:
        """Return the factor for a step. `weight`: the approximate weight of each micro-batch on
        this rank. Every rank of `group` calls it.
        """
        expected = float(weight) * self._micro_batches
        total = torch.full((), expected, dtype=torch.float64, device=self._device)
        group.all_reduce(total, place="for the first loss scale").wait()
        return _near_one_over(total.item() or 1.0)

    def record_weight(self, weight: float) -> None:
        """Record the weight of a step, over all ranks."""
        self._weight = weight or self._weight


def _near_one_over(weight: float) -> float:
    return 2.0 ** -math.ceil(math.log2(weight))
