"""A straight line through measured times: latency and seconds per byte, as Hockney's model has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Fit:
    """`first * x + second * y`, and by how much of itself a point lies beside it: the root of the mean square."""

    first: float
    second: float
    error: float


def fit(points: Sequence[tuple[float, float, float]]) -> Fit:
    """Through points (x, y, seconds), such as (messages, bytes, seconds). Neither is below 0: of a line that would have one so, the other alone is fitted.

    Each point counts by its relative error, so that microseconds are not lost beside seconds.
    """
    assert points, "nothing was measured"
    rows = np.array([[x / seconds, y / seconds] for x, y, seconds in points])
    ones = np.ones(len(rows))
    found = np.linalg.lstsq(rows, ones, rcond=None)[0]
    if (found < 0).any():
        alone = [(rows[:, column] @ ones) / max(rows[:, column] @ rows[:, column], 1e-300) for column in (0, 1)]
        tried = [np.array([alone[0], 0.0]), np.array([0.0, alone[1]])]
        found = min(tried, key=lambda each: float(np.square(rows @ each - 1).sum()))
    error = float(np.sqrt(np.mean(np.square(rows @ found - 1))))
    return Fit(float(found[0]), float(found[1]), error)
