"""`lockstep bench train`: the time of one training step in several variants on this host, and the
fastest of those that `lockstep train` can run.

All variants get the same micro-batches on the same ranks, in turns, so other load on the host slows
all of them alike. Loading is not timed. After each round the variants that are clearly slower than
the best are out, and the others take more turns.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import nn

import lockstep
from lockstep.errors import UsageError
from lockstep.runs import Settings
from lockstep.timing import Trial, trial
from lockstep.tools.timing.in_turns import take_turns
from lockstep.tools.timing.machine import kind_of_device
from lockstep.tools.timing.output_files import counted, milliseconds, table

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "stepper": {},
    "sharded": {"update": "sharded", "weights": "separate"},
    "weights": {"update": "sharded", "weights": "shared"},
}
"""The options of `lockstep train` that train as a variant does, by its name."""
VARIANTS = ("ddp:5", "ddp:25", "ddp:100", "wrapper", *OPTIONS)
_WINDOWS = 4  # that the steps cycle through
_ROUNDS = 3
_NEAR = 1.2  # of the best median: a variant above it is out
LEVEL = 1.02
"""Variants whose medians differ by less are as fast as each other: a second run may turn them round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """The measurement of one variant."""

    variant: str
    threads: int
    """Intra-op threads of each rank."""
    seconds: list[float]
    """Seconds of each step on the slowest rank. Variants that were out after a round have fewer;
    the first ones are of the same turns.
    """

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def order(self) -> tuple[int, float]:
        """The key by which rows are sorted: a variant that stayed for more rounds is faster."""
        return -len(self.seconds), self.median

    def ratio(self, other: StepRow) -> float:
        """Return the time of the other row, divided by this row's, over the turns of both."""
        turns = min(len(self.seconds), len(other.seconds))
        return statistics.median(other.seconds[:turns]) / statistics.median(self.seconds[:turns])

    def level_with(self, other: StepRow) -> bool:
        """Whether it is not slower than the other row by more than runs differ."""
        return self.ratio(other) * LEVEL > 1

    def __str__(self) -> str:
        return f"{self.variant} with {counted(self.threads, 'thread')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComparison:
    """The comparison of all variants of a step of one task."""

    task: str
    recipe: str
    """How the global batch is divided, in words."""
    workers: int
    device: str
    gradient_mib: float
    rows: list[StepRow]
    """The fastest one first."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Variants that cannot be measured here, each with its reason."""

    @property
    def ddp(self) -> StepRow | None:
        """The fastest row of torch's DDP."""
        return next((row for row in self.rows if row.variant.startswith("ddp")), None)

    @property
    def fastest(self) -> StepRow | None:
        """The fastest row of those that `lockstep train` can run. Of rows that are as fast as each
        other it is the one with the fewest options.
        """
        ours = [row for row in self.rows if row.variant in OPTIONS]
        if not ours:
            return None
        names = [*OPTIONS]
        level = [row for row in ours if row.level_with(ours[0])]
        return min(level, key=lambda row: names.index(row.variant))

    def as_json(self) -> dict[str, Any]:
        names = {"ddp": str(self.ddp), "fastest": str(self.fastest)}
        return asdict(self) | names | {"cores": os.cpu_count(), "torch": torch.__version__}


def measure(
    source: Callable[[], lockstep.Task],
    settings: Settings,
    *,
    variants: Sequence[str] = VARIANTS,
    steps: int = 30,
) -> StepComparison:
    """Measure on new ranks of this host.

    Args:
        source: returns the task; every rank calls it.
        settings: the number of workers, the device, and the other options of all variants.
        variants: names of OPTIONS, "wrapper", and "ddp:" with a bucket size in MB.
        steps: turns of each variant in a round.

    Raises:
        UsageError: fewer GPUs than ranks, a task that leaves a rank without micro-batches, or no
            variant that can be measured here.
    """
    gpus = torch.cuda.device_count()
    if kind_of_device(settings.device) == "cuda" and settings.workers > gpus:
        raise UsageError("too-few-gpus", workers=settings.workers, gpus=gpus)
    _check_shares(source(), settings.workers)
    arguments = (source, settings, tuple(variants), steps)
    comparison: StepComparison = lockstep.launch(_on_rank, settings.workers, arguments)[0]
    if not comparison.rows:
        reasons = [f"{name} is left out: {why}" for name, why in comparison.left_out.items()]
        raise UsageError("no-variant-left", reasons=reasons)
    return comparison


def _check_shares(task: lockstep.Task, workers: int) -> None:
    """Raise UsageError if the last rank has no micro-batch: torch's DDP would wait for it forever.
    An order of the task's own, and a stream, are taken to fill a step.
    """
    if task.order is not None or not hasattr(task.train_data, "__len__"):
        return
    loader = lockstep.Loader(
        task.train_data,
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
        device="cpu",
        rank=workers - 1,
        size=workers,
    )
    _check_share(task, workers, len(loader.window(0, 0)))


def _check_share(task: lockstep.Task, workers: int, least: int) -> None:
    """Raise UsageError if the rank with the fewest micro-batches has none."""
    if least == 0:
        raise UsageError(
            "fewer-micro-batches-than-ranks",
            task=task.name,
            workers=workers,
            global_batch=task.global_batch,
            micro_batch=task.micro_batch,
        )


def _on_rank(
    source: Callable[[], lockstep.Task], settings: Settings, names: Sequence[str], steps: int
) -> StepComparison:
    task = source()
    device = "cpu" if settings.device == "cpu" else None
    with lockstep.init(device=device) as world, ExitStack() as stack:
        counts = sorted({1, torch.get_num_threads()})
        base = stack.enter_context(trial(task, settings, world))
        windows = list(_like_the_first(base))
        variants: dict[str, Step] = {}
        left_out = {}
        for name in names:
            if name == "stepper":
                variants[name] = base.step
            elif name not in OPTIONS:
                variants[name] = Loop(name, base, _weights(base, windows))
            else:
                options = settings.replaced(OPTIONS[name])
                try:
                    variants[name] = stack.enter_context(trial(task, options, world)).step
                except UsageError as error:  # on all ranks alike
                    left_out[name] = str(error)
        turns = {}
        for threads in counts:
            for name, step in variants.items():
                turns[Key(name, threads)] = _over(windows, step)
        rows = []
        for key, values in _rounds(turns, steps, world).items():
            rows.append(StepRow(variant=key.variant, threads=key.threads, seconds=values))
        parameters = [one for one in base.stepper.model.parameters() if one.requires_grad]
        return StepComparison(
            task=task.name or "task",
            recipe=base.loader.describe(),
            workers=world.size,
            device=world.device.type,
            gradient_mib=sum(parameter.nbytes for parameter in parameters) / 2**20,
            rows=sorted(rows, key=lambda row: row.order),
            left_out=left_out,
        )


Step = Callable[[Any], object]
"""Takes one optimizer step over a window of a Loader."""


class Key(NamedTuple):
    """What has a turn."""

    variant: str
    threads: int


def _like_the_first(base: Trial) -> Iterator[Any]:
    """Yield windows with as many micro-batches on every rank as the first one has. Their batches
    are loaded. Raises UsageError on all ranks if one has none.
    """
    most = 0
    count = 0
    for window in base.windows():
        most = most or len(window)
        _check_share(base.task, base.world.size, int(base.world.agree(most > 0, "all")))
        if base.world.agree(len(window) == most, "all"):
            list(window)  # loads the batches
            yield window
            count += 1
        if count == _WINDOWS:
            return


def _over(windows: Sequence[Any], step: Step) -> Callable[[], object]:
    """Return a function that takes a step over the next window, in a cycle."""
    remaining = cycle(windows)
    return lambda: step(next(remaining))


def _rounds(
    turns: Mapping[Key, Callable[[], object]], steps: int, world: lockstep.World
) -> dict[Key, list[float]]:
    """Return the seconds of all turns. A variant that is clearly slower takes none in the next round."""
    seconds: dict[Key, list[float]] = {key: [] for key in turns}
    remaining = dict(turns)
    for _ in range(_ROUNDS):
        measured = take_turns(remaining, steps, world, prepare=lambda key: _use(key.threads))
        for key, values in measured.items():
            seconds[key] += values
        medians = {key: statistics.median(seconds[key]) for key in remaining}
        remaining = {key: turns[key] for key in finalists(medians)}
    return seconds


def finalists(medians: Mapping[Key, float]) -> list[Key]:
    """Return those that are not clearly slower than the best one, and the best DDP, because the
    others are compared with it; the fastest first.
    """
    by_time = sorted(medians, key=lambda key: medians[key])
    near = [key for key in by_time if medians[key] <= _NEAR * medians[by_time[0]]]
    ddp = [key for key in by_time if key.variant.startswith("ddp")]
    return list(dict.fromkeys(near + ddp[:1]))


def _use(threads: int) -> None:
    """Compute with this number of threads, all of which have started."""
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
        torch.zeros(2**18).add_(1)


def _weights(base: Trial, windows: Sequence[Any]) -> dict[int, float]:
    """Return the weight of each window over all ranks, by its step. Raises UsageError for a window
    without weight.
    """
    loss_of = base.loss_of(base.stepper.model)
    own = torch.zeros(len(windows), dtype=torch.float64)
    with torch.no_grad():
        for index, window in enumerate(windows):
            for batch in window:
                own[index] += float(loss_of(batch)[1])
    base.world.control.all_reduce(own).wait()
    weights = {}
    for window, weight in zip(windows, own.tolist(), strict=True):
        if not weight > 0:
            raise UsageError("window-without-weight", task=base.task.name, weight=weight)
        weights[window.step] = weight
    return weights


class Loop:
    """The loop that a careful user writes around torch's DDP or Lockstep's: gradients are summed in
    the last micro-batch only, and losses are scaled so that the mean over ranks is that over the
    global batch. A Stepper sends the weights with the gradients; here they are known at no cost.

    Args:
        name: "wrapper", or "ddp:" and the bucket size in MB.
        base: a training of the same task.
        weights: of each window, by its step.
    """

    def __init__(self, name: str, base: Trial, weights: Mapping[int, float]) -> None:
        task = base.task
        device = base.world.device
        self._weights = weights
        self._clip = task.clip
        self._size = base.world.size
        model = task.model().to(device)
        if task.compile:
            model.compile()
        self.model = model
        self._optimizer = task.optimizer(model)
        self._scaler = torch.amp.GradScaler(device.type, enabled=base.stepper.scaler is not None)
        if name == "wrapper":
            self._wrapped: Any = lockstep.DistributedDataParallel(model, world=base.world)
        else:
            self._wrapped = nn.parallel.DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                bucket_cap_mb=float(name.removeprefix("ddp:")),
            )
        self._loss_of = base.loss_of(self._wrapped)

    def __call__(self, window: Any) -> None:
        optimizer, scaler = self._optimizer, self._scaler
        optimizer.zero_grad()
        scale = self._size / self._weights[window.step]
        last = len(window) - 1
        for index, batch in enumerate(window):
            with nullcontext() if index == last else self._wrapped.no_sync():
                loss, _ = self._loss_of(batch)
                scaler.scale(loss * scale).backward()
        if self._clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        scaler.step(optimizer)
        scaler.update()


def text(comparison: StepComparison) -> str:
    """Return the table, and which variant is the fastest, by how much. "DDP / it" is the median of
    the fastest DDP divided by the line's, over the same turns: above 1 is faster than DDP.
    """
    ddp = comparison.ddp
    rows = []
    for row in comparison.rows:
        ratio = "" if ddp is None else f"{row.ratio(ddp):.2f}"
        turns = str(len(row.seconds))
        rows.append([row.variant, str(row.threads), turns, milliseconds(row.median), ratio])
    lines = [
        f"{comparison.task}: {comparison.recipe}; {comparison.gradient_mib:.1f} MiB of gradients",
        f"{counted(comparison.workers, 'rank')} on {comparison.device}, torch {torch.__version__}",
        table("variant | threads | steps | median | DDP / it", rows),
    ]
    for name, reason in comparison.left_out.items():
        lines.append(f"{name} is left out: {reason}")
    if comparison.fastest is not None:
        lines.append(_choice(comparison.fastest, comparison.rows))
    return "\n".join(lines)


def _choice(fastest: StepRow, rows: Sequence[StepRow]) -> str:
    """Say how the chosen row stands among the others."""
    words = f"the fastest that `lockstep train` runs: {fastest}"
    others = [row for row in rows if row is not fastest]
    level = [row for row in others if row.level_with(fastest)]
    if level:
        return f"{words}; as fast, within {100 * (LEVEL - 1):.0f} %: {', '.join(map(str, level))}"
    if others:
        return f"{words}; {others[0]} takes {100 * (fastest.ratio(others[0]) - 1):+.1f} %"
    return words
