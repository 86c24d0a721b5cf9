"""Predicts how the step of a task changes with the number of ranks, with a simulation for each
number; as a table and as a picture. Also the time lost to failures, and the layouts of the task.

Goodput follows Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
2006. For failures of a Poisson process, it uses the complete model of the wall time (equation 20)
and the higher-order interval (equation 37), whose first term is Young's sqrt(2 cost x MTBF) (1974).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.collectives.network import Network
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.tools.drawing import FAINT, SERIES, Drawing
from lockstep.tools.plan.carriers import OneHost
from lockstep.tools.plan.model_plan import RankMemory
from lockstep.tools.plan.networks import PlanNetwork
from lockstep.tools.plan.simulate import HEAD, Assumed, PlanRow, Predicted, simulate, spent
from lockstep.tools.plan.work import (
    PlanScaling,
    check_mesh,
    heard,
    over,
    samples_of,
    slots_of,
    work_of,
)
from lockstep.tools.svg import Plot, figure
from lockstep.tools.timing.machine import memory_of_a_rank
from lockstep.tools.timing.output_files import megabytes, percent, table
from lockstep.tools.timing.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Failures and their cost, in seconds."""

    mtbf: float
    """Mean time between failures of one rank."""
    checkpoint: float
    """Time for which a checkpoint stops the training."""
    restart: float
    """Time from a failure until the training runs again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Goodput of a number of ranks; a failure of any rank stops all of them."""

    interval: float
    """Seconds of work between two checkpoints at which the least time is lost."""
    share: float
    """Share of the time that is spent on steps that are kept."""


def goodput(failures: Failures, workers: int) -> Goodput:
    """Return the goodput at the best checkpoint interval."""
    mtbf = failures.mtbf / workers
    cost = failures.checkpoint
    if cost < 2 * mtbf:
        ratio = cost / (2 * mtbf)
        interval = math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    else:
        interval = mtbf
    return Goodput(interval=interval, share=share_of_work(failures, workers, interval))


def share_of_work(failures: Failures, workers: int, interval: float) -> float:
    """Return the goodput with a checkpoint after every `interval` seconds of work. 0 if a segment
    hardly ever ends before the next failure.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveRow(PlanRow):
    """The row of one number of ranks."""

    goodput: Goodput | None

    def as_json(self) -> dict[str, Any]:
        step, goodput = self.predicted, self.goodput
        return {
            "workers": self.workers,
            **self.figures(),
            "bytes_sent": step.sent,
            "communication_ms": 1e3 * step.communication,
            "parts_ms": {name: 1e3 * seconds for name, seconds in step.parts.items()},
            **({"goodput": goodput.share} if goodput else {}),
            **({"checkpoint_interval_s": goodput.interval} if goodput else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Predictions for one task on one network."""

    task: str
    scaling: PlanScaling
    slots: int
    """Number of micro-batches of the task's own global batch."""
    rows: Sequence[CurveRow]
    """Rows in order of the number of ranks."""

    @property
    def idle_from(self) -> int | None:
        """The first number of ranks at which some have no micro-batch; None if all have one."""
        if self.scaling.weak:
            return None
        return next((row.workers for row in self.rows if row.workers > self.slots), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What to predict from a profile. Raises UsageError for a mesh that cannot be planned, before
    anything is measured.
    """

    workers: Sequence[int]
    scaling: PlanScaling
    method: Parallelism
    failures: Failures | None = None
    storage: float | None = None
    """Samples per second that a shared storage gives to all ranks together; None: no limit."""

    def __post_init__(self) -> None:
        if self.method.mesh is not None:
            # one rank is only the base for comparison, and has no mesh
            counts = {*self.workers, self.scaling.base} - {1}
            check_mesh(self.method.mesh, "a task", 0, counts)


def curve(profile: Profile, asked: Question, joined: PlanNetwork) -> Curve:
    """Predict the rows. Raises UsageError if the profile or this host lacks a measurement."""
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
    """Predict one step with `method`, which may differ from `asked.method`. The data axis of a mesh
    is as long as the number of ranks allows; one rank has no mesh.
    """
    if method.mesh is not None:
        method = replace(method, mesh=over(method.mesh, workers))
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
    """Whether to add the time of the software to messages: not on one host, where it is measured,
    and not on a free network, where messages take no time.
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
    """Whether reduce="auto" would try a hierarchical sum, as gradients/reductions.py does: on CPUs,
    with several ranks on each of several hosts.
    """
    whole = (
        method.reduce == "auto"
        and method.compression is None
        and not method.server
        and (method.mesh is None or method.mesh.only_data)
    )
    return (
        whole
        and profile.device == "cpu"
        and isinstance(network, Network)
        and 1 < network.ranks_per_node < workers
    )


def describe(found: Curve) -> str:
    """Return a text with a line for each number of ranks."""
    head = [*HEAD, "sent a step"]
    head += ["goodput", "save every"] if any(row.goodput for row in found.rows) else []
    return "\n".join(
        (table([*head, "limiting"], map(_cells, found.rows), left=[len(head)]), *_notes(found))
    )


def _cells(row: CurveRow) -> list[object]:
    step, goodput = row.predicted, row.goodput
    failures = [] if goodput is None else [percent(goodput.share), spent(goodput.interval)]
    share = 100 * step.parts[step.limiting] / step.step
    return [*row.cells(), megabytes(step.sent), *failures, f"{step.limiting} {share:.0f} %"]


def _notes(found: Curve) -> Iterator[str]:
    base = found.scaling.base
    kind = (
        f"every rank keeps its share of {base} (weak scaling)"
        if found.scaling.weak
        else "the global batch stays the same (strong scaling)"
    )
    yield f"{kind}; efficiency is relative to {base} rank{'s' * (base > 1)}"
    if found.idle_from is not None:
        yield (
            f"a step has {found.slots} micro-batch{'es' * (found.slots > 1)}: among"
            f" {found.idle_from} ranks some have none and wait. Use a smaller micro_batch, a"
            " larger global_batch, or --weak"
        )


def drawing(found: Curve) -> Drawing:
    """Draw samples per second over the number of ranks, with their interval and the ideal line."""
    counts = [row.workers for row in found.rows]
    first = found.rows[0]
    ideal = [first.samples_per_s / first.efficiency * count / first.workers for count in counts]
    low = [row.samples / row.predicted.high for row in found.rows]
    high = [row.samples / row.predicted.low for row in found.rows]
    names = {"ideal": FAINT, "predicted, and where 8 steps of 10 lie": SERIES[0]}
    plot = Plot(
        (counts[0], counts[-1]),
        "workers",
        up=(min(low), max([*ideal, *high])),
        up_label="samples/s",
        legend=names,
        numbers={count: str(count) for count in counts[:: -(-len(counts) // 8)]},
        log="across up" if len(counts) > 1 else "",
    )
    plot.curve(zip(counts, ideal, strict=True), FAINT, dashes="5 4")
    plot.band(zip(counts, low, strict=True), zip(counts, high, strict=True), SERIES[0])
    predicted = [(row.workers, row.samples_per_s) for row in found.rows]
    plot.curve(predicted, SERIES[0], dots=True)
    kind = "weak" if found.scaling.weak else "strong"
    return figure(f"{found.task}, {kind} scaling", [plot], describe(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLayout(RankMemory):
    """A layout of a task, and the memory of its rank. `activations` includes all other temporary
    memory of a step.
    """

    name: str
    fits: bool
    """Whether it fits into the memory of a rank on a host like this one."""
    step_ms: float


def layouts_of(profile: Profile, asked: Question, joined: PlanNetwork) -> list[TaskLayout]:
    """Return layouts for the largest number of ranks: those that fit, the fastest first, then the
    others.

    Empty for one rank, if a method was chosen, if the memory of a step is unknown, and for
    `--network here`, which measures replicas only.
    """
    workers = max(asked.workers)
    if (
        workers == 1
        or profile.peak is None
        or isinstance(joined.network, OneHost)
        or asked.method != Parallelism()
    ):
        return []
    room = memory_of_a_rank(asked.scaling.on_host(workers))
    found = []
    for name, method, parts, last in (
        ("replicated", Parallelism(), 1, 1),
        ("update sharded", Parallelism(update="sharded"), 1, workers),
        (f"mesh shard={workers}", Parallelism(mesh=Mesh(shard=workers)), workers, workers),
    ):
        step = predicted(profile, asked, joined, workers, method).step
        found.append(_layout(name, profile, parts, last, room, 1e3 * step))
    return sorted(found, key=lambda each: (not each.fits, each.step_ms))


def _layout(
    name: str, profile: Profile, parts: int, last: int, room: float | None, step_ms: float
) -> TaskLayout:
    """Return one layout. `parts`: number of ranks that share a parameter and its gradient; `last`:
    number of ranks that share the optimizer's state. With `parts` above 1, two buckets at a time
    are gathered.
    """
    gradients = sum(bucket.elements for bucket in profile.buckets) * profile.width
    whole = (
        0 if parts == 1 else 2 * max(bucket.elements for bucket in profile.buckets) * profile.width
    )
    assert profile.peak is not None
    made = TaskLayout(
        name=name,
        weights=min(profile.weights, profile.weights / parts + whole),
        gradients=min(gradients, gradients / parts + whole),
        optimizer=profile.states / last,
        activations=max(0.0, profile.peak - profile.weights - gradients - profile.states),
        fits=True,
        step_ms=step_ms,
    )
    return replace(made, fits=room is None or made.total <= room)


def describe_layouts(found: Sequence[TaskLayout], workers: int) -> str:
    """Return a text with a line for each layout; empty if there are none."""
    if not found:
        return ""
    head = f"a rank of {workers} holds, in MB | weights | gradients | optimizer | activations | step | "
    return f"\n{table(head, map(_layout_cells, found), left=[0, 6])}\n"


def _layout_cells(each: TaskLayout) -> list[str]:
    sizes = [
        f"{size / 1e6:.2f}"
        for size in (each.weights, each.gradients, each.optimizer, each.activations)
    ]
    return [
        each.name,
        *sizes,
        f"{each.step_ms:.1f} ms",
        "" if each.fits else "does not fit into the memory of a host like this",
    ]
