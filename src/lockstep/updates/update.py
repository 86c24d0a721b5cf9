"""What an update is: who applies the summed gradients to the parameters, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim import Optimizer

from lockstep.gradients.reducer import Reducer


@dataclass(frozen=True, slots=True)
class Applied:
    """What an update did: the gradient's norm before clipping (None where nobody asked for it), and whether the optimizer stepped."""

    norm: float | None
    applied: bool
    reason: str | None = None


class Update(Protocol):
    """One per reducer and optimizer."""

    name: str

    def bind(self, reducer: Reducer, optimizer: Optimizer) -> None:
        """Take charge of them. Refuses, by name, what it cannot run."""
        ...

    def apply(self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler | None) -> Applied:
        """Divide the sums, check that they are finite, clip once, step the optimizer."""
        ...
