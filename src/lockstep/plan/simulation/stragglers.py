"""Who is waited for: the largest of W draws from a normal distribution.

A step that every rank must end takes as long as the slowest one. Of W independent draws the largest has the distribution Phi(x)^W; its mean grows as
sqrt(2 ln W), from 0.56 standard deviations above the mean for two ranks to 4.3 for 65,536 (David and Nagaraja, Order Statistics, 2003).
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

_STEP = 0.005  # of the trapezoids, in standard deviations: the integrands are smooth, and the error below 1e-6
_FAR = 8.0  # standard deviations; beyond them lies less than 1e-15


@lru_cache(maxsize=1024)
def expected_maximum(draws: int) -> float:
    """In standard deviations above the mean; 0 for one draw. The integral of 1 - Phi^W above 0, less that of Phi^W below it."""
    assert draws >= 1
    above = np.arange(0, _FAR + _STEP / 2, _STEP)
    tail = np.array([0.5 * math.erfc(each / math.sqrt(2)) for each in above])  # 1 - Phi(x), which is Phi(-x)
    late = -np.expm1(draws * np.log1p(-tail))
    early = tail**draws
    values = late - early
    return float(_STEP * (values.sum() - (values[0] + values[-1]) / 2))


def quantile_of_maximum(share: float, draws: int) -> float:
    """What the largest of so many draws stays below in this share of the cases, in standard deviations above the mean."""
    assert 0 < share < 1
    return -NormalDist().inv_cdf(-math.expm1(math.log(share) / draws))  # the tail is small, and 1 less it would lose its digits
