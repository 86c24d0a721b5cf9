"""The norm of a gradient whose model is divided among ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.updates.norm_and_clip import InBuckets


@dataclass(frozen=True, slots=True)
class SplitNorm:
    """The norm if every rank of `replica` has a part of the model. `counted(name)`: whether this
    rank's part of a parameter counts, because no element may count twice.
    """

    replica: Group
    counted: Callable[[str], bool]

    def __call__(self, summed: InBuckets, divisor: float) -> Tensor:
        """Each rank brings its own `divisor`: along the data axis ranks may sum differently, and
        some have divided already.
        """
        squares = torch.zeros((), dtype=torch.float64, device=summed.device)
        for name, gradient in summed.named():
            if self.counted(name):
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                norm = torch.linalg.vector_norm(gradient, dtype=dtype)
                squares += norm.double().square()
        squares /= divisor**2
        for group in (*summed.spread, self.replica):
            group.all_reduce(squares, place="for the gradient's norm").wait()
        return squares.sqrt()
