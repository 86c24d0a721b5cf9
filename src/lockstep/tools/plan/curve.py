"""Predicts how the step of a task changes with the number of ranks, with a simulation for each
number, and writes the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.parallelism import Parallelism
from lockstep.data.windows import counted
from lockstep.schedules.network import Network
from lockstep.tools.plan.simulate import Predicted, duration, simulate
from lockstep.tools.plan.work import (
    PlanScaling,
    representative_ranks,
    samples_of,
    slots_of,
    work_of,
)
from lockstep.tools.timing.output_files import megabytes, percent, table
from lockstep.tools.timing.profile import Profile

_HEAD = ("workers", "step", "efficiency", "samples/s", "sent a step", "limiting")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """The step of one number of ranks."""

    predicted: Predicted
    samples: float
    """Samples of all ranks in a step."""
    efficiency: float
    """Speedup over the base, divided by the ratio of the numbers of ranks."""

    @property
    def workers(self) -> int:
        return self.predicted.workers

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks."""
        return self.samples / self.predicted.step

    def as_json(self) -> dict[str, Any]:
        step = self.predicted
        return {
            "workers": self.workers,
            "step_ms": 1e3 * step.step,
            "efficiency": self.efficiency,
            "limiting": step.limiting,
            "samples_per_s": self.samples_per_s,
            "bytes_sent": step.sent,
            "communication_ms": 1e3 * step.communication,
            "parts_ms": {name: 1e3 * seconds for name, seconds in step.parts.items()},
        }

    def cells(self) -> list[object]:
        """Return the cells of the table."""
        step = self.predicted
        return [
            self.workers,
            duration(step.step),
            percent(self.efficiency),
            f"{self.samples_per_s:.4g}",
            megabytes(step.sent),
            f"{step.limiting} {100 * step.parts[step.limiting] / step.step:.0f} %",
        ]


def plan_rows(
    profile: Profile,
    counts: Sequence[int],
    scaling: PlanScaling,
    network: Network,
    method: Parallelism,
) -> list[PlanRow]:
    """Return a row for each number of ranks, in their order. Raises UsageError for a method that is
    not simulated.
    """
    base = predicted(profile, scaling.base, scaling, network, method)
    base_rate = samples_of(profile, scaling, scaling.base) / base.step / scaling.base
    rows = []
    for workers in sorted(set(counts)):
        step = predicted(profile, workers, scaling, network, method)
        samples = samples_of(profile, scaling, workers)
        efficiency = samples / step.step / workers / base_rate
        rows.append(PlanRow(predicted=step, samples=samples, efficiency=efficiency))
    return rows


def predicted(
    profile: Profile, workers: int, scaling: PlanScaling, network: Network, method: Parallelism
) -> Predicted:
    """Predict one step. On several CPU hosts of several ranks, "auto" is the faster of the backend's
    sum and the hierarchical one, as in a training (gradients/reductions.py).
    """
    work = work_of(profile, scaling, workers)
    free = network.between.latency == 0 and math.isinf(network.between.bandwidth)
    software = (
        0.0 if workers == 1 or free else profile.message(representative_ranks(scaling, workers))
    )
    step = simulate(work, workers, network, method, software)
    several_hosts = 1 < network.ranks_per_node < workers
    uncompressed = method.reduce == "auto" and method.compression is None
    if several_hosts and uncompressed and profile.device == "cpu":
        hierarchical = replace(method, reduce="hierarchical")
        other = simulate(work, workers, network, hierarchical, software)
        if other.step < step.step:
            return other
    return step


def describe(rows: Sequence[PlanRow], profile: Profile, scaling: PlanScaling) -> str:
    """Return a text with a line for each number of ranks."""
    lines = table(_HEAD, [row.cells() for row in rows], left=[len(_HEAD) - 1])
    return "\n".join((lines, *_notes(rows, slots_of(profile), scaling)))


def _notes(rows: Sequence[PlanRow], slots: int, scaling: PlanScaling) -> Iterator[str]:
    base = scaling.base
    kind = "the global batch stays the same (strong scaling)"
    if scaling.weak:
        kind = f"every rank keeps its share of {base} (weak scaling)"
    yield f"{kind}; efficiency is relative to {counted(base, 'rank')}"
    idle = [row.workers for row in rows if row.workers > slots]
    if idle and not scaling.weak:
        yield (
            f"a step has {counted(slots, 'micro-batch', 'es')}: among {idle[0]} ranks some have"
            " none and wait. Use a smaller micro_batch, a larger global_batch, or --weak"
        )
