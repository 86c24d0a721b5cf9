"""Plans a step from a few numbers, without a task or a measurement: bytes of gradients, number of
equal buckets, seconds of computation. docs/explore/index.html computes the same.

A third of the computation is the forward. Bucket i of n is complete after (i + 1)/n of the
backward. The computation of a rank does not depend on the number of ranks: the global batch grows
with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import knob
from lockstep.config.parallelism import Parallelism
from lockstep.schedules.network import Network
from lockstep.schedules.schedule import spans
from lockstep.tools.plan.simulate import Predicted, duration, simulate
from lockstep.tools.plan.work import BACKWARD, WIDTH, RankWork
from lockstep.tools.timing.output_files import megabytes, percent, table
from lockstep.tools.timing.profile import Leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenStep:
    """The step of every rank. Raises UsageError for numbers out of range."""

    gradient_mb: float
    """Size of the float32 gradients in 10^6 bytes; rounded to whole elements."""
    buckets: int
    step_ms: float
    """Milliseconds of a rank's forward and backward."""

    def __post_init__(self) -> None:
        knob.number("gradient_mb", self.gradient_mb, above=0)
        knob.whole("buckets", self.buckets)
        knob.number("step_ms", self.step_ms, above=0)

    @property
    def elements(self) -> int:
        return math.floor(self.gradient_mb * 1e6 / WIDTH + 0.5)

    def work(self) -> RankWork:
        seconds = self.step_ms / 1e3
        sizes = [stop - start for start, stop in spans(self.elements, self.buckets)]
        return RankWork(
            forward=(1 - BACKWARD) * seconds,
            backward=BACKWARD * seconds,
            micro_batches=1,
            buckets=[
                Leaves(ready=(number + 1) / self.buckets, elements=size)
                for number, size in enumerate(sizes)
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenRow:
    """The predicted step for one number of ranks."""

    workers: int
    predicted: Predicted

    @property
    def efficiency(self) -> float:
        """The share of the step that is computation."""
        return self.predicted.computation / self.predicted.step

    def as_json(self) -> dict[str, Any]:
        step = self.predicted
        return {
            "workers": self.workers,
            "step_ms": 1e3 * step.step,
            "efficiency": self.efficiency,
            "exposed_ms": 1e3 * step.exposed,
            "communication_ms": 1e3 * step.communication,
            "bytes_sent": step.sent,
        }


def rows(
    step: GivenStep,
    counts: Sequence[int],
    network: Network,
    method: Parallelism,
) -> list[GivenRow]:
    """Return a row for each number of ranks."""
    work = step.work()
    return [
        GivenRow(workers=workers, predicted=simulate(work, workers, network, method))
        for workers in counts
    ]


def describe(step: GivenStep, predictions: Sequence[GivenRow]) -> str:
    """Return a text with a line for each number of ranks."""
    head = "workers | step | efficiency | exposed | communication | sent a step"
    lines = [
        (
            row.workers,
            duration(row.predicted.step),
            percent(row.efficiency),
            duration(row.predicted.exposed),
            duration(row.predicted.communication),
            megabytes(row.predicted.sent),
        )
        for row in predictions
    ]
    sizes = f"{step.gradient_mb:g} MB of gradients in {step.buckets} equal buckets"
    return f"{sizes}; every rank computes {step.step_ms:g} ms\n{table(head, lines, left=())}"
