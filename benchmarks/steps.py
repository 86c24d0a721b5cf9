"""Times one training step of a task in several variants, on the same ranks in turns, and checks
that all variants make the same update. Makes a table.

All variants get the same micro-batches and are timed step by step, so that noise of a shared
machine affects all alike. Loading is not timed. Peak memory is measured in ranks that hold one
variant only. The final weights are compared, because the time of a different update is of no use.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import baselines
from baselines import Feed, feed, too_few
from lockstep.config import knob
from lockstep.config.settings import Device
from lockstep.config.task import Task
from lockstep.data.windows import Plan, counted
from lockstep.errors import UsageError
from lockstep.launcher.launch import launch
from lockstep.tools.timing.in_turns import largest, take_turns
from lockstep.tools.timing.machine import kind_of_device
from lockstep.tools.timing.output_files import milliseconds, table
from lockstep.training.metrics import finite
from lockstep.training.opening import backend_of, matmul_precision
from lockstep.world.world import World, init

BASELINES = ("local", "ddp:5", "ddp:25", "ddp:100")
VARIANTS = (*BASELINES, "stepper:native", "stepper:shared", "stepper:sharded", "stepper:weights")
_WARM_UP = 3
_STEPS_FOR_MEMORY = 5
# in bf16, a loss scaled by another factor is rounded differently in every layer
_TOLERANCE = {"bf16": 0.3}
_TOLERANCE_ELSE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """The measurement of one variant."""

    variant: str
    seconds: list[float]
    """Seconds of each step on the slowest rank."""
    apart: float | None = None
    """Distance of the final weights from those of the reference (the first DDP variant), divided by
    the distance that those moved; None if not compared.
    """
    peak_mib: float | None = None
    """Peak growth of memory since before the model was built, in MiB, of the rank with most; None
    if not measured.
    """

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def p25(self) -> float:
        """25th percentile of the seconds of a step."""
        if len(self.seconds) == 1:
            return self.seconds[0]
        return statistics.quantiles(self.seconds, n=4)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComparison:
    """The comparison of all variants of a step of one task."""

    task: str
    recipe: str
    workers: int
    device: str
    precision: str
    steps: int
    gradient_mib: float
    rows: list[StepRow]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Variants that cannot be measured here, each with its reason."""
    notes: Sequence[str] = ()

    @property
    def best(self) -> StepRow | None:
        """The DDP variant with the lowest median."""
        ddp = [row for row in self.rows if row.variant.startswith("ddp")]
        return min(ddp, key=lambda row: row.median, default=None)

    @property
    def tolerance(self) -> float:
        """The largest `apart` that rounding alone explains: with AdamW, a gradient of nearly 0
        can move its weight in either direction.
        """
        return _TOLERANCE.get(self.precision, _TOLERANCE_ELSE)

    @property
    def wrong(self) -> list[StepRow]:
        """The variants whose weights differ too much: they made another update."""
        return [row for row in self.rows if row.apart is not None and row.apart > self.tolerance]

    def ratio(self, row: StepRow) -> float | None:
        """Return the median of the best DDP variant divided by that of `row`."""
        return self.best.median / row.median if self.best else None

    def as_json(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            derived = {"median": row.median, "p25": row.p25, "ratio": self.ratio(row)}
            rows.append(asdict(row) | derived)
        data = asdict(self) | {
            "rows": rows,
            "tolerance": self.tolerance,
            "best": None if self.best is None else self.best.variant,
            "cores": os.cpu_count(),
            "versions": {"torch": str(torch.__version__)},
        }
        return dict(finite(data))


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
    """Measure on `workers` new ranks of this host, which call `source` for the task.

    `others`: more wrappers to compare, by the name of their variant. Ranks are new processes, so
    they must be able to import these. Raises UsageError for unknown variants, if the task leaves a
    rank without micro-batches, and if `steps` is below 1.
    """
    task = source()
    others = others or {}
    _check(task, workers, variants, steps, others)
    kind = kind_of_device(device)
    gpus = torch.cuda.device_count()
    if kind == "cuda" and workers > gpus:
        raise UsageError("too-few-gpus", workers=workers, gpus=gpus)
    names = []
    left_out = {}
    for name in variants:
        reason = baselines.why_not(name, workers, kind)
        if reason is None:
            names.append(name)
        else:
            left_out[name] = reason
    if not names:
        reasons = [f"{name} is left out: {reason}" for name, reason in left_out.items()]
        raise UsageError("no-variant-left", reasons=reasons)
    measured = launch(on_rank, workers=workers, args=(source, names, steps, kind, others))[0]
    rows = []
    for name in names:
        peak_mib = None
        if memory:
            peak_mib = launch(_peak_on_rank, workers=workers, args=(source, name, kind, others))[0]
        rows.append(
            StepRow(
                variant=name,
                seconds=measured.seconds[name],
                apart=measured.apart.get(name),
                peak_mib=peak_mib,
            )
        )
    return StepComparison(
        task=task.name or "task",
        recipe=measured.recipe,
        workers=workers,
        device=kind,
        precision=task.precision,
        steps=steps,
        gradient_mib=measured.gradient_mib,
        rows=rows,
        left_out=left_out,
        notes=measured.notes,
    )


def _check(
    task: Task, workers: int, variants: Sequence[str], steps: int, others: baselines.Wrappers
) -> None:
    """Raise UsageError here for what would fail on every rank. A stream, whose length is unknown,
    is assumed to fill a step.
    """
    knob.whole("steps", steps)
    knob.whole("workers", workers)
    for name in variants:
        baselines.maker(name, others)
    twice = [name for name in variants if variants.count(name) > 1]
    if twice:
        raise UsageError("given-twice", where=f"variants={','.join(variants)}", name=twice[0])
    length = getattr(task.train_data, "__len__", None)
    samples = task.global_batch if length is None or task.order is not None else length()
    plan = Plan(samples=samples, global_batch=task.global_batch, micro_batch=task.micro_batch)
    if not plan.cut(0).filled(workers - 1, workers):
        raise too_few(task, workers)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one measurement."""

    recipe: str
    seconds: dict[str, list[float]]
    apart: dict[str, float]
    gradient_mib: float
    notes: list[str]


def on_rank(
    source: Callable[[], Task],
    names: Sequence[str],
    steps: int,
    device: Device,
    others: baselines.Wrappers,
) -> Found:
    """Take the variants' steps in turns on this rank, in the world that the environment names.
    Every rank calls it alike.
    """
    task = source()
    with init(backend=backend_of(device)) as world, matmul_precision(task.precision):
        data = feed(task, task.precision, world)
        setting = baselines.Setting(
            task=task,
            world=world,
            precision=task.precision,
            steps=steps + _WARM_UP,
            keyed=data.draws,
        )
        built = baselines.build(names, setting, others)
        first = next(iter(built.values())).model
        start = [parameter.detach().clone() for parameter in first.parameters()]
        turns = {name: _turns(variant, data) for name, variant in built.items()}
        seconds = take_turns(turns, steps, world, warm_up=_WARM_UP)
        notes = []
        compared: dict[str, nn.Module] = {}
        if task.precision == "fp16":
            notes.append(
                "weights not compared: with fp16 each variant skips the steps that overflow its"
                " own loss scale"
            )
        else:
            for name, variant in built.items():
                if name != "local" or world.size == 1:
                    compared[name] = variant.model
        if data.draws:
            notes.append(
                "the model draws random numbers: the loops around a DDP seed them for each"
                " micro-batch, as a Stepper does anyway"
            )
        apart = _apart(compared, start, world)
        trained = [parameter for parameter in first.parameters() if parameter.requires_grad]
        size = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        return Found(data.recipe, seconds, apart, size / 2**20, notes)


def _turns(variant: baselines.Baseline, data: Feed) -> Callable[[], None]:
    """Return a function that takes a step of the variant with the next window, in a cycle."""
    windows = cycle(data.given)
    return lambda: variant(next(windows))


def _apart(
    models: Mapping[str, nn.Module], start: Sequence[Tensor], world: World
) -> dict[str, float]:
    """Return the distance of each model's parameters from those of the reference, divided by the
    distance that those moved; the largest over all ranks. The reference is the first DDP variant,
    or the first variant if there is no DDP.

    Buffers are not compared: Lockstep averages BatchNorm's moving statistics over ranks, torch's
    DDP takes those of rank 0.
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


def _distance(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    parts = []
    for tensor, other in zip(tensors, others, strict=True):
        gap = (tensor.detach() - other.detach()).double()
        parts.append(torch.linalg.vector_norm(gap).item())
    return math.hypot(*parts)


class Peak:
    """Measures the peak memory use since its creation. `mib()` is the rise over the use at its
    creation. Pages shared with other ranks count.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Start to measure the device's memory if it is a GPU, otherwise the host's. Raises
        OSError if the system does not report it.
        """
        self._device = device if device is not None and device.type == "cuda" else None
        gc.collect()
        if self._device is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError, AttributeError):
            # The C library keeps freed memory; using it again would not count as a rise.
            ctypes.CDLL(None).malloc_trim(0)
        try:
            # Reset the peak: imports or the parent process may have set it.
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            raise OSError(f"/proc/self/clear_refs: {error.strerror}") from error
        self._before = from_proc("/proc/self/status", "VmRSS")

    def mib(self) -> float:
        if self._device is not None:
            return (torch.cuda.max_memory_allocated(self._device) - self._before) / 2**20
        return (from_proc("/proc/self/status", "VmHWM") - self._before) / 2**20


def from_proc(file: str, name: str) -> int:
    """Return the bytes in line `name` of a table in /proc. Raises OSError if there is no such table."""
    try:
        lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise OSError(f"{file}: {error.strerror}") from error
    line = next(line for line in lines if line.startswith(f"{name}:"))
    kib = int(line.split()[1])
    return 1024 * kib


def _peak_on_rank(
    source: Callable[[], Task], name: str, device: Device, others: baselines.Wrappers
) -> float:
    task = source()
    with init(backend=backend_of(device)) as world, matmul_precision(task.precision):
        # the weights of windows do not change memory, so they are not computed
        data = feed(task, task.precision, world, weighed=False)
        # the first optimizer imports modules: do it before the measurement
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
        peak = Peak(world.device)
        setting = baselines.Setting(
            task=task, world=world, precision=task.precision, steps=_STEPS_FOR_MEMORY, keyed=False
        )
        turns = _turns(baselines.maker(name, others)(setting), data)
        for _ in range(_STEPS_FOR_MEMORY):
            turns()
        return largest(peak.mib(), world)


def text(comparison: StepComparison) -> str:
    """Return a text with a line for each variant. "DDP / it" is the median of the best DDP variant
    divided by the line's: above 1 is faster than DDP.
    """
    rows = comparison.rows
    best = f"; best DDP: {comparison.best.variant}" if comparison.best else ""
    head = ["variant", "median", "p25", "DDP / it", "apart"]
    if any(row.peak_mib is not None for row in rows):
        head.append("peak MiB")
    lines = [
        f"{comparison.task}: {comparison.recipe}; {comparison.gradient_mib:.1f} MiB of gradients,"
        f" {comparison.precision}",
        f"{counted(comparison.workers, 'rank')} on {comparison.device}, torch"
        f" {torch.__version__}, {comparison.steps} steps each in turns{best}",
        table(head, [_row(comparison, row)[: len(head)] for row in rows]),
    ]
    for name, reason in comparison.left_out.items():
        lines.append(f"{name} is left out: {reason}")
    for note in comparison.notes:
        lines += textwrap.wrap(note, 120)
    references = [row.variant for row in rows if row.apart is None]
    ddp_first = sorted(references, key=lambda variant: not variant.startswith("ddp"))
    for row in comparison.wrong:
        lines.append(
            f"{row.variant} trained something else: its weights lie {row.apart:.2g} of the way that"
            f" they moved from those of {ddp_first[0]}, and more than {comparison.tolerance:g} is"
            " no rounding"
        )
    return "\n".join(lines)


def _row(comparison: StepComparison, row: StepRow) -> list[str]:
    ratio = comparison.ratio(row)
    return [
        row.variant,
        milliseconds(row.median),
        milliseconds(row.p25),
        "" if ratio is None else f"{ratio:.2f}",
        "" if row.apart is None else f"{row.apart:.0e}",
        "" if row.peak_mib is None else f"{row.peak_mib:.1f}",
    ]
