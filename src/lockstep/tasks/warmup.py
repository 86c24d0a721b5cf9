"""The learning rate of the bundled tasks: up in a straight line, down along half a cosine. Any
number of steps will do, also one.
"""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_and_cosine(
    optimizer: Optimizer, steps: int, *, warmup: float, floor: float = 0.0
) -> LambdaLR:
    """Peak at the optimizer's own rate after the share `warmup` of all steps; at the end `floor`
    times the peak.
    """
    return LambdaLR(optimizer, partial(share_of_peak, steps=steps, warmup=warmup, floor=floor))


def share_of_peak(step: int, *, steps: int, warmup: float, floor: float) -> float:
    """For the step after `step` others: above 0 from the first on."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    done = min(1.0, (step + 1 - rise) / max(1, steps - rise))
    return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2
