"""Does a fixed draw look like chance? Every bound is five standard deviations, and seeds are
fixed: such a test passes always or never.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def usual(counts: Any, expected: Any) -> bool:
    """Whether chi-square of `counts`, of any shape, lies within its mean and five standard
    deviations; `expected` counts are broadcast.
    """
    counts = np.asarray(counts, dtype=np.float64)
    expected = np.broadcast_to(np.asarray(expected, dtype=np.float64), counts.shape)
    assert expected.min() > 0
    assert math.isclose(counts.sum(), expected.sum(), rel_tol=1e-9), (
        "both are of the same number of draws"
    )
    freedom = counts.size - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return chi_square < freedom + 5 * math.sqrt(2 * freedom)


def places(values: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """How often each of 0 .. n - 1 comes."""
    return np.bincount(values.ravel(), minlength=n)
