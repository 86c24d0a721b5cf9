"""What failures take of a training's time: work since the last checkpoint is done again, and
checkpoints cost time as well.

Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006: with
failures of a Poisson process, its complete model of the wall time (equation 20) and its
higher-order interval (equation 37), whose first term is Young's sqrt(2 cost x MTBF) (1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Seconds. Raises UsageError for what cannot be."""

    mtbf: float
    """Mean time between failures of one rank."""
    checkpoint: float
    """That a checkpoint holds the training up."""
    restart: float
    """From a failure until the work goes on."""

    def __post_init__(self) -> None:
        if not 0 < self.mtbf < math.inf:
            raise UsageError(
                f"--mtbf {self.mtbf / 3600:g}: give the hours between two failures of one rank,"
                " above 0"
            )
        if not 0 < self.checkpoint < math.inf:
            raise UsageError(
                f"--checkpoint-cost {self.checkpoint:g}: give the seconds that a checkpoint takes,"
                " above 0"
            )
        if not 0 <= self.restart < math.inf:
            raise UsageError(
                f"--restart {self.restart:g}: give the seconds from a failure until the work goes"
                " on, 0 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Of so many ranks, any of which stops all."""

    interval: float
    """Seconds of work from one checkpoint to the next, at which the least is lost."""
    share: float
    """Of the time in which steps are made that stay."""


def goodput(failures: Failures, workers: int) -> Goodput:
    """At the best interval."""
    mtbf = failures.mtbf / workers
    cost = failures.checkpoint
    if cost < 2 * mtbf:
        ratio = cost / (2 * mtbf)
        interval = math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    else:
        interval = mtbf
    return Goodput(interval=interval, share=share_of_work(failures, workers, interval))


def share_of_work(failures: Failures, workers: int, interval: float) -> float:
    """With a checkpoint after every so many seconds of work. 0 where hardly any segment ever
    ends before the next failure.
    """
    mtbf = failures.mtbf / workers
    try:
        wall = (
            mtbf
            * math.exp(failures.restart / mtbf)
            * math.expm1((interval + failures.checkpoint) / mtbf)
        )
    except OverflowError:
        return 0.0
    return interval / wall
