"""How a training's step changes with the number of ranks: a row for each number, every one of
them a simulation; as a table and as a picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.collectives.network import Network
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.tools.plan.carriers import OneHost
from lockstep.tools.plan.connection import PlanNetwork
from lockstep.tools.plan.goodput import Failures, Goodput, goodput
from lockstep.tools.plan.of_task import PlanScaling, heard, samples_of, slots_of, work_of
from lockstep.tools.plan.simulate import Assumed, Predicted, simulate
from lockstep.tools.timing.output_files import picture
from lockstep.tools.timing.profile import Profile
from lockstep.tools.timing.tables import megabytes, percent, table


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveRow:
    """So many ranks."""

    workers: int
    predicted: Predicted
    samples: float
    """Of all ranks in a step."""
    efficiency: float
    """Speedup over the ranks that it is compared with, over the ratio of their numbers."""
    goodput: Goodput | None

    @property
    def samples_per_s(self) -> float:
        """While nothing fails."""
        return self.samples / self.predicted.step

    def as_json(self) -> dict[str, Any]:
        step = self.predicted
        found: dict[str, Any] = {
            "workers": self.workers,
            "step_ms": 1e3 * step.step,
            "efficiency": self.efficiency,
            "limiting": step.limiting,
            "samples_per_s": self.samples_per_s,
            "low_ms": 1e3 * step.low,
            "high_ms": 1e3 * step.high,
            "bytes_sent": step.sent,
            "communication_ms": 1e3 * step.communication,
            "parts_ms": {name: 1e3 * seconds for name, seconds in step.parts.items()},
        }
        if self.goodput is not None:
            found |= {"goodput": self.goodput.share, "checkpoint_interval_s": self.goodput.interval}
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Of one task on one network."""

    task: str
    scaling: PlanScaling
    slots: int
    """Micro-batches of the task's own global batch."""
    rows: Sequence[CurveRow]
    """By growing number of ranks."""

    @property
    def idle_from(self) -> int | None:
        """The first number of ranks of which some have no micro-batch; None where all have."""
        if self.scaling.weak:
            return None
        return next((row.workers for row in self.rows if row.workers > self.slots), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked about a profile. Raises UsageError for a mesh that cannot be planned, before
    anything is measured.
    """

    workers: Sequence[int]
    scaling: PlanScaling
    method: Parallelism
    failures: Failures | None = None
    storage: float | None = None
    """Samples a second for all ranks together."""

    def __post_init__(self) -> None:
        if self.method.mesh is not None:
            _check_mesh(self.method.mesh, {*self.workers, self.scaling.base})


def _check_mesh(mesh: Mesh, counts: Iterable[int]) -> None:
    """Of a task nobody knows the layers, and all ranks but a single one stand somewhere in the
    mesh.
    """
    if mesh.pipeline * mesh.tensor > 1:
        raise UsageError(
            f"--mesh {mesh} with the plan of a task: no profile says what goes from layer to layer;"
            " give data and shard only, or --model and --device in place of the task"
        )
    if wrong := sorted(count for count in counts if count > 1 and count % mesh.shard):
        raise UsageError(
            f"--mesh {mesh} with --workers {','.join(map(str, wrong))}: shard takes {mesh.shard}"
            f" ranks; give multiples of {mesh.shard}, such as --workers"
            f" {mesh.shard},{2 * mesh.shard}, or 1"
        )


def curve(profile: Profile, asked: Question, joined: PlanNetwork) -> Curve:
    """Raises UsageError for what the profile or this host does not say."""
    base = predicted(profile, asked, joined, asked.scaling.base, asked.method)
    base_rate = (
        samples_of(profile, asked.scaling, asked.scaling.base) / base.step / asked.scaling.base
    )
    rows = []
    for workers in sorted(set(asked.workers)):
        found = predicted(profile, asked, joined, workers, asked.method)
        samples = samples_of(profile, asked.scaling, workers)
        rows.append(
            CurveRow(
                workers=workers,
                predicted=found,
                samples=samples,
                efficiency=samples / found.step / workers / base_rate,
                goodput=None if asked.failures is None else goodput(asked.failures, workers),
            )
        )
    return Curve(task=profile.task, scaling=asked.scaling, slots=slots_of(profile), rows=rows)


def predicted(
    profile: Profile, asked: Question, joined: PlanNetwork, workers: int, method: Parallelism
) -> Predicted:
    """One step by `method`, which need not be the one that was asked for. A mesh's data axis is
    as long as the ranks allow; one rank is no mesh.
    """
    if method.mesh is not None:
        shard = method.mesh.shard if workers > 1 else 1
        method = replace(method, mesh=Mesh(data=workers // shard, shard=shard))
    work = work_of(profile, asked.scaling, workers)
    software = (
        profile.message(heard(asked.scaling, workers)) if _takes_software(joined, workers) else 0.0
    )
    assumed = Assumed(
        native=joined.native, link_error=joined.error, software=software, storage=asked.storage
    )
    found = simulate(work, workers, joined.network, method, assumed)
    if _may_be_hierarchical(profile, joined.network, method, workers):
        hierarchical = replace(method, reduce="hierarchical")
        return min(
            found,
            simulate(work, workers, joined.network, hierarchical, assumed),
            key=lambda each: each.step,
        )
    return found


def _takes_software(joined: PlanNetwork, workers: int) -> bool:
    """Whether messages have a part that no network takes from them. Of a free network that is
    taken away too.
    """
    return (
        workers > 1
        and isinstance(joined.network, Network)
        and not (
            joined.network.between.latency == 0 and math.isinf(joined.network.between.bandwidth)
        )
    )


def _may_be_hierarchical(
    profile: Profile, network: Network | OneHost, method: Parallelism, workers: int
) -> bool:
    """Whether reduce="auto" would try it, as gradients/reductions.py does: several ranks on each
    of several hosts, on CPUs.
    """
    whole = (
        method.reduce == "auto"
        and method.compression is None
        and method.server is None
        and (method.mesh is None or method.mesh.only_data)
    )
    return (
        whole
        and profile.device == "cpu"
        and isinstance(network, Network)
        and 1 < network.ranks_per_node < workers
    )


def describe(found: Curve) -> str:
    """A line a number of ranks. Of the steps, eight of ten are foretold to lie in the interval."""
    head = ["workers", "step", "8 of 10 lie in", "efficiency", "samples/s", "sent a step"]
    head += ["goodput", "save every"] if any(row.goodput for row in found.rows) else []
    return "\n".join(
        (table([*head, "limiting"], map(_cells, found.rows), left=[len(head)]), *_notes(found))
    )


def _cells(row: CurveRow) -> list[str]:
    step = row.predicted
    between = f"{_time(step.low)} .. {_time(step.high)}"
    cells = [
        str(row.workers),
        _time(step.step),
        between,
        percent(row.efficiency),
        f"{row.samples_per_s:.4g}",
        megabytes(step.sent),
    ]
    if row.goodput is not None:
        cells += [percent(row.goodput.share), _time(row.goodput.interval)]
    return [*cells, f"{step.limiting} {100 * step.parts[step.limiting] / step.step:.0f} %"]


def _notes(found: Curve) -> Iterator[str]:
    base = found.scaling.base
    kind = (
        f"every rank keeps its share of {base} (weak scaling)"
        if found.scaling.weak
        else "the global batch stays (strong scaling)"
    )
    yield f"{kind}; efficiency is against {base} rank{'s' * (base > 1)}"
    if found.idle_from is not None:
        yield (
            f"a step has {found.slots} micro-batch{'es' * (found.slots > 1)}: among"
            f" {found.idle_from} ranks some have none, and wait; a smaller micro_batch, a larger"
            " global_batch or --weak gives them something to do"
        )


def plot(found: Curve, file: Path) -> None:
    """Samples a second over the number of ranks, with the interval and the ideal line. Raises
    UsageError without matplotlib.
    """
    counts = [row.workers for row in found.rows]
    first = found.rows[0]
    with picture(file, 1, 6.4, 4.2) as (figure, (axis,)):
        ideal = [first.samples_per_s / first.efficiency * count / first.workers for count in counts]
        axis.plot(counts, ideal, "--", color="0.6", label="ideal")
        axis.plot(
            counts,
            [row.samples_per_s for row in found.rows],
            "o-",
            color="tab:blue",
            markersize=4,
            label="predicted",
        )
        low = [row.samples / row.predicted.high for row in found.rows]
        high = [row.samples / row.predicted.low for row in found.rows]
        axis.fill_between(counts, low, high, color="tab:blue", alpha=0.2, label="8 steps of 10")
        axis.set(xlabel="workers", ylabel="samples/s")
        if len(counts) > 1:
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.minorticks_off()
        axis.set_title(f"{found.task}, {'weak' if found.scaling.weak else 'strong'} scaling")
        axis.grid(alpha=0.3)
        axis.legend()
        figure.tight_layout()


def _time(seconds: float) -> str:
    if seconds < 10:
        return f"{1e3 * seconds:.1f} ms"
    return f"{seconds:.4g} s" if seconds < 600 else f"{seconds / 60:.4g} min"
