"""The learning rate of the bundled tasks: a linear warm-up, then a half cosine down. It works for
any number of steps, even one.
"""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_and_cosine(
    optimizer: Optimizer, steps: int, *, warmup: float, floor: float = 0.0
) -> LambdaLR:
    """Return a scheduler whose peak is the optimizer's own rate, after the fraction `warmup` of all
    steps. At the end the rate is `floor` times the peak.
    """
    return LambdaLR(optimizer, partial(share_of_peak, steps=steps, warmup=warmup, floor=floor))


def share_of_peak(step: int, *, steps: int, warmup: float, floor: float) -> float:
    """Return the learning rate of step `step` (from 0) divided by the peak. It is above 0 in the
    first step.
    """
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    done = min(1.0, (step + 1 - rise) / max(1, steps - rise))
    return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2
