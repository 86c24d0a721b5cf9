"""Hockney's model of a link: a latency plus seconds per byte. Fits it to times, and measures it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lockstep.tools.timing.in_turns import Way
    from lockstep.world.world import World

_TURNS = 15


@dataclass(frozen=True, slots=True)
class Fit:
    """The model `first * x + second * y`. `error` is the root mean square of the relative errors
    of its points.
    """

    first: float
    second: float
    error: float


def fit(points: Sequence[tuple[float, float, float]]) -> Fit:
    """Fit points (x, y, seconds), such as (messages, bytes, seconds). No coefficient is below 0: if
    one would be, it is 0 and only the other is fitted.

    The fit minimizes relative errors, so that microseconds count as much as seconds.
    """
    assert points, "nothing was measured"
    rows = np.array([[x / seconds, y / seconds] for x, y, seconds in points])
    ones = np.ones(len(rows))
    found = np.linalg.lstsq(rows, ones, rcond=None)[0]
    if (found < 0).any():
        alone = (rows * ones[:, None]).sum(0) / np.maximum(np.square(rows).sum(0), 1e-300)
        found = min(np.diag(alone), key=lambda each: float(np.square(rows @ each - 1).sum()))
    error = float(np.sqrt(np.mean(np.square(rows @ found - 1))))
    return Fit(float(found[0]), float(found[1]), error)


def measured(sums: Mapping[int, Way], world: World) -> Fit:
    """Time messages in turns, and fit them. `sums` has a function for each number of bytes.
    `first` is the latency in seconds, `second` the seconds per byte. All ranks call it.
    """
    from lockstep.tools.timing.in_turns import take_turns  # imports torch; a fit does without it

    seconds = take_turns({str(size): send for size, send in sums.items()}, _TURNS, world)
    return fit([(1, size, statistics.median(seconds[str(size)])) for size in sums])
