"""How long one training step of a task takes, in every way that there is, on the same ranks in
turns; and whether all made the same update. As a table and as a picture.

The ways take the same micro-batches and are timed step by step, so that the noise of a shared
machine falls on all alike. Loading is not timed. Peak memory is measured in ranks that hold one way
only. What comes out of the ways is compared too: a step that trains something else is no step of
this task, however quick it is.
"""

from __future__ import annotations

import math
import os
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import knob
from lockstep.config.settings import Device
from lockstep.config.task import Task
from lockstep.data.windows import Plan, counted
from lockstep.errors import UsageError
from lockstep.launcher.launch import launch
from lockstep.step.forward import matmul_precision
from lockstep.tools.bench import baselines
from lockstep.tools.bench.baselines import Feed, feed, too_few
from lockstep.tools.drawing import INK, Drawing
from lockstep.tools.svg import Plot, figure
from lockstep.tools.timing.in_turns import largest, take_turns
from lockstep.tools.timing.machine import Peak, kind_of_device
from lockstep.tools.timing.output_files import milliseconds, table
from lockstep.training.metrics import finite
from lockstep.training.opening import backend_of
from lockstep.world.world import World, init

BASELINES = ("local", "ddp:5", "ddp:25", "ddp:100")
VARIANTS = (*BASELINES, "stepper:native", "stepper:shared", "stepper:sharded", "stepper:weights")
_WARM_UP = 3
_STEPS_FOR_MEMORY = 5
# a loss scaled by another factor is rounded to other 8 bits in every layer
_TOLERANCE = {"bf16": 0.3}
_TOLERANCE_ELSE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One way."""

    variant: str
    seconds: list[float]
    """Of each step, on the slowest rank."""
    apart: float | None = None
    """Distance of its weights from the first DDP's at the end, over the distance that those
    moved; None where not compared.
    """
    peak_mib: float | None = None
    """By which a rank's memory rose at its peak over what it was before the model; the fullest
    rank's. None where not measured.
    """

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def p25(self) -> float:
        """Seconds."""
        return (
            statistics.quantiles(self.seconds, n=4)[0] if len(self.seconds) > 1 else self.seconds[0]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComparison:
    """All ways to take a step of one task."""

    task: str
    recipe: str
    workers: int
    device: str
    precision: str
    steps: int
    gradient_mib: float
    rows: list[StepRow]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Ways that cannot be measured here, and why."""
    notes: Sequence[str] = ()

    @property
    def best(self) -> StepRow | None:
        """The DDP with the lowest median."""
        return min(
            (row for row in self.rows if row.variant.startswith("ddp")),
            key=lambda row: row.median,
            default=None,
        )

    @property
    def tolerance(self) -> float:
        """How far `apart` rounding alone may bring two ways: with AdamW a gradient of nearly 0
        moves its weight in either direction.
        """
        return _TOLERANCE.get(self.precision, _TOLERANCE_ELSE)

    @property
    def wrong(self) -> list[StepRow]:
        """Ways that trained something else."""
        return [row for row in self.rows if row.apart is not None and row.apart > self.tolerance]

    def ratio(self, row: StepRow) -> float | None:
        """The best DDP's median over this one's."""
        return self.best.median / row.median if self.best else None

    def as_json(self) -> dict[str, Any]:
        more = [
            {"median": row.median, "p25": row.p25, "ratio": self.ratio(row)} for row in self.rows
        ]
        found = asdict(self) | {
            "rows": [asdict(row) | each for row, each in zip(self.rows, more, strict=True)]
        }
        best = self.best.variant if self.best else None
        found = found | {
            "tolerance": self.tolerance,
            "best": best,
            "cores": os.cpu_count(),
            "versions": {"torch": str(torch.__version__)},
        }
        return dict(finite(found))


def measure(
    source: Callable[[], Task],
    *,
    workers: int,
    variants: Sequence[str] = VARIANTS,
    steps: int = 30,
    device: Device = "auto",
    memory: bool = False,
    others: baselines.Wrappers | None = None,
) -> StepComparison:
    """Measure on that many fresh ranks of this host, which call `source` for the task.

    `others`: wrappers to compare with beside torch's DDP, by the name of their variant; importable,
    since ranks are new processes. Raises UsageError for variants that there are not, tasks that
    leave a rank without micro-batches, and no steps.
    """
    task = source()
    others = others or {}
    _check(task, workers, variants, steps, others)
    kind = kind_of_device(device)
    if kind == "cuda" and workers > (gpus := torch.cuda.device_count()):
        raise UsageError("too-few-gpus", workers=workers, gpus=gpus)
    why_not = {name: baselines.why_not(name, workers, kind) for name in variants}
    names = [name for name in variants if why_not[name] is None]
    left_out = {name: reason for name, reason in why_not.items() if reason is not None}
    if not names:
        reasons = [f"{name} is left out: {reason}" for name, reason in left_out.items()]
        raise UsageError("no-variant-left", reasons=reasons)
    found = launch(_on_rank, workers=workers, args=(source, names, steps, kind, others))[0]
    measured = names if memory else []
    peaks = {
        name: launch(_peak_on_rank, workers=workers, args=(source, name, kind, others))[0]
        for name in measured
    }
    return StepComparison(
        task=task.name or "task",
        recipe=found.recipe,
        workers=workers,
        device=kind,
        precision=task.precision,
        steps=steps,
        gradient_mib=found.gradient_mib,
        rows=[
            StepRow(
                variant=name,
                seconds=found.seconds[name],
                apart=found.apart.get(name),
                peak_mib=peaks.get(name),
            )
            for name in names
        ],
        left_out=left_out,
        notes=found.notes,
    )


def _check(
    task: Task, workers: int, variants: Sequence[str], steps: int, others: baselines.Wrappers
) -> None:
    """Refuse here, in a sentence, what the ranks would find out one by one. Streams do not say
    how long they are.
    """
    for name, value in (("steps", steps), ("workers", workers)):
        knob.whole(name, value)
    for name in variants:
        baselines.maker(name, others)
    twice = [name for name in variants if variants.count(name) > 1]
    if twice:
        raise UsageError("given-twice", where=f"variants={','.join(variants)}", name=twice[0])
    length = getattr(task.train_data, "__len__", None)
    samples = task.global_batch if length is None or task.order is not None else length()
    if (
        not Plan(samples=samples, global_batch=task.global_batch, micro_batch=task.micro_batch)
        .cut(0)
        .filled(workers - 1, workers)
    ):
        raise too_few(task, workers)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the ranks of one measurement have to say."""

    recipe: str
    seconds: dict[str, list[float]]
    apart: dict[str, float]
    gradient_mib: float
    notes: list[str]


def _on_rank(
    source: Callable[[], Task],
    names: list[str],
    steps: int,
    device: Device,
    others: baselines.Wrappers,
) -> _Found:
    task = source()
    with init(backend=backend_of(device)) as world, matmul_precision(task.precision):
        given = feed(task, task.precision, world)
        setting = baselines.Setting(
            task=task,
            world=world,
            precision=task.precision,
            steps=steps + _WARM_UP,
            keyed=given.draws,
        )
        built = baselines.build(names, setting, others)
        first = next(iter(built.values())).model
        start = [parameter.detach().clone() for parameter in first.parameters()]
        seconds = take_turns(
            {name: _turns(way, given) for name, way in built.items()},
            steps,
            world,
            warm_up=_WARM_UP,
        )
        compared = [name for name in names if name != "local" or world.size == 1]
        notes = []
        if task.precision == "fp16":
            notes.append(
                "weights not compared: with fp16 each variant skips the steps that overflow its"
                " own loss scale"
            )
            compared = []
        if given.draws:
            notes.append(
                "the model draws random numbers: the loops around a DDP seed them for each"
                " micro-batch, as a Stepper does anyway"
            )
        apart = _apart({name: built[name].model for name in compared}, start, world)
        trained = sum(
            parameter.numel() * parameter.element_size()
            for parameter in first.parameters()
            if parameter.requires_grad
        )
        return _Found(given.recipe, seconds, apart, trained / 2**20, notes)


def _turns(way: baselines.Baseline, given: Feed) -> Callable[[], None]:
    """The way, going round in the windows."""
    windows = cycle(given.given)
    return lambda: way(next(windows))


def _apart(
    models: Mapping[str, nn.Module], start: Sequence[Tensor], world: World
) -> dict[str, float]:
    """For each model but the reference: how far its parameters lie from that one's, over how far
    those moved. The worst rank's.

    Buffers are not compared: we average BatchNorm's moving statistics over ranks, torch's DDP has
    rank 0's.
    """
    reference = next((name for name in models if name.startswith("ddp")), next(iter(models), None))
    compared = [name for name in models if name != reference]
    if reference is None or not compared:
        return {}
    aim = list(models[reference].parameters())
    moved = _distance(aim, start)
    gaps = []
    for name in compared:
        gap = _distance(list(models[name].parameters()), aim)
        share = gap / moved if moved else (math.inf if gap else 0.0)
        gaps.append(math.inf if math.isnan(share) else share)
    worst = torch.tensor(gaps, dtype=torch.float64)
    world.control.all_reduce(worst, "max").wait()
    return dict(zip(compared, worst.tolist(), strict=True))


def _distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    parts = [
        torch.linalg.vector_norm((a.detach() - b.detach()).double()).item()
        for a, b in zip(ours, theirs, strict=True)
    ]
    return math.hypot(*parts)


def _peak_on_rank(
    source: Callable[[], Task], name: str, device: Device, others: baselines.Wrappers
) -> float:
    task = source()
    with init(backend=backend_of(device)) as world, matmul_precision(task.precision):
        # what a sum is divided by does not change what is held
        given = feed(task, task.precision, world, weighed=False)
        # what a first optimizer imports is not the memory of a step
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
        peak = Peak(world.device)
        setting = baselines.Setting(
            task=task, world=world, precision=task.precision, steps=_STEPS_FOR_MEMORY, keyed=False
        )
        turns = _turns(baselines.maker(name, others)(setting), given)
        for _ in range(_STEPS_FOR_MEMORY):
            turns()
        return largest(peak.mib(), world)


_COLOURS = {
    "local": "var(--grey)",
    "ddp": "var(--orange)",
    "accelerate": "var(--red)",
    "fabric": "var(--purple)",
}
_OURS = "var(--blue)"


def text(found: StepComparison) -> str:
    """A line a way. "DDP / it" is the best DDP's median over this one's: above 1 is quicker than
    DDP.
    """
    best = f"; best DDP: {found.best.variant}" if found.best else ""
    has_memory = any(row.peak_mib is not None for row in found.rows)
    head = ["variant", "median", "p25", "DDP / it", "apart", *(["peak MiB"] if has_memory else [])]
    compared = [
        row.variant
        for row in sorted(found.rows, key=lambda row: not row.variant.startswith("ddp"))
        if row.apart is None
    ]
    wrong = [
        f"{row.variant} trained something else: its weights lie {row.apart:.2g} of the way that"
        f" they moved from those of {compared[0]}, and more than {found.tolerance:g} is no rounding"
        for row in found.wrong
    ]
    return "\n".join(
        [
            (
                f"{found.task}: {found.recipe}; {found.gradient_mib:.1f} MiB of gradients,"
                f" {found.precision}"
            ),
            (
                f"{counted(found.workers, 'rank')} on {found.device}, torch {torch.__version__},"
                f" {found.steps} steps each in turns{best}"
            ),
            table(head, [_row(found, row)[: len(head)] for row in found.rows]),
            *(f"{name} is left out: {reason}" for name, reason in found.left_out.items()),
            *("\n".join(textwrap.wrap(note, 120)) for note in found.notes),
            *wrong,
        ]
    )


def _row(found: StepComparison, row: StepRow) -> list[str]:
    figures = [(found.ratio(row), ".2f"), (row.apart, ".0e"), (row.peak_mib, ".1f")]
    told = ["" if each is None else f"{each:{how}}" for each, how in figures]
    return [row.variant, milliseconds(row.median), milliseconds(row.p25), *told]


def drawing(every: Sequence[StepComparison]) -> Drawing:
    """A panel a task, a bar a way: the median, and a mark at the 25th percentile."""
    described = "\n\n".join(map(text, every))
    return figure("One training step beside DDP", [_panel(each) for each in every], described)


def _panel(found: StepComparison) -> Plot:
    names = [row.variant for row in found.rows]
    most = max(1e3 * row.median for row in found.rows)
    title = f"{found.task}, {counted(found.workers, 'rank')} on {found.device}"
    legend = {"Lockstep": _OURS, "DDP": _COLOURS["ddp"], "25th percentile": INK}
    label = "ms a step, median of the slowest rank"
    plot = Plot((0, 1.2 * most), label, rows=names, legend=legend, title=title)
    if found.best is not None:
        at = plot.x(1e3 * found.best.median)
        plot.line([(at, plot.y(0)), (at, plot.y(len(names)))], _COLOURS["ddp"], 1, "4 3")
    for place, row in enumerate(found.rows):
        median, low = 1e3 * row.median, 1e3 * row.p25
        colour = _COLOURS.get(row.variant.partition(":")[0], _OURS)
        plot.bar(0, median, place + 0.15, 0.7, colour)
        plot.bar(low - 0.004 * most, low + 0.004 * most, place + 0.05, 0.9, INK)
        plot.said(median + 0.1 * most, place + 0.5, f"{median:.1f}")
    return plot
