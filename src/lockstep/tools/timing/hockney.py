"""Hockney's model of a link, a latency and seconds per byte: fitted to times, and measured."""

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
    """`first * x + second * y`, and by how much of itself a point lies beside it: the root of
    the mean square.
    """

    first: float
    second: float
    error: float


def fit(points: Sequence[tuple[float, float, float]]) -> Fit:
    """Through points (x, y, seconds), such as (messages, bytes, seconds). Neither is below 0: of a
    line that would have one so, the other alone is fitted.

    Each point counts by its relative error, so that microseconds are not lost beside seconds.
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
    """Of messages by their number of bytes, sent in turns: `first` is the latency of one,
    `second` the seconds of a byte. All ranks call it.
    """
    from lockstep.tools.timing.in_turns import take_turns  # with torch, which a fit does not need

    seconds = take_turns({str(size): send for size, send in sums.items()}, _TURNS, world)
    return fit([(1, size, statistics.median(seconds[str(size)])) for size in sums])
