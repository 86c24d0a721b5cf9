"""Compute steps of a recorded run again, on one process or on several, and compare them with what was
recorded.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import lockstep
from lockstep.checkpoints import files
from lockstep.errors import DamagedCheckpoint, UsageError
from lockstep.runs import AssembledTraining, Run, Settings, load_task, rebuilt, worst
from lockstep.tools.replay.computed import ComputedStep, Detail, Replay, ReplayedMicroBatch
from lockstep.tools.verify.trace import tolerance_at
from lockstep.tools.verify.tracing import tensors_of
from lockstep.training.resume import differences, machine
from lockstep.training.task_digest import changes, task_digests


def steps_of(text: str, run: Run) -> tuple[int, int]:
    """Return the first and the last step that `text` names: N, N:M, last, worst, or all.

    Raises UsageError for another text, and for steps that the run has not recorded.
    """
    if not run.steps:
        raise UsageError("no-step-recorded", run=str(run.path))
    if text == "last":
        first = last = run.steps[-1].step
    elif text == "all":
        first, last = 1, run.steps[-1].step
    elif text == "worst":
        first = last = _worst(run)
    else:
        begin, colon, end = text.partition(":")
        if not begin.isdecimal() or not (end.isdecimal() if colon else True):
            raise UsageError(
                "wrong-value", name="step", value=text, expected="N, N:M, last, worst or all"
            )
        first = int(begin)
        last = int(end) if colon else first
    recorded = run.steps[-1].step
    if not 1 <= first <= last <= recorded:
        raise UsageError("step-not-recorded", step=text, last=recorded, run=str(run.path))
    if not any(run.step(step) for step in range(first, last + 1)):
        raise UsageError("step-left-out", step=text, run=str(run.path))
    return first, last


def _worst(run: Run) -> int:
    spike = worst(run.steps)
    return run.steps[0].step if spike is None else spike.step


@dataclass(frozen=True, slots=True)
class StartingCheckpoint:
    """The checkpoint from which steps are computed again."""

    directory: Path
    step: int
    state: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """What a replay computes, and with which settings."""

    run: Run
    settings: Settings
    """Those of the run, for the ranks of the replay."""
    start: StartingCheckpoint | None
    """None: from the seed."""
    last: int
    warnings: Sequence[str]
    """What makes other numbers likely, or was left out."""

    @property
    def count(self) -> int:
        """The number of steps to compute."""
        return self.last - self.begin

    @property
    def begin(self) -> int:
        """Steps before the first one that is computed."""
        return self.start.step if self.start else 0

    @property
    def seconds(self) -> float:
        """About how long it takes, by the recorded times; nan if they are unknown."""
        times = []
        workers = min(self.settings.workers, os.cpu_count() or 1)
        for record in self.run.steps:
            if self.begin < record.step <= self.last and record.samples_per_s > 0:
                busy = sum(record.samples_by_rank) / record.samples_per_s
                times.append(busy * len(record.samples_by_rank) / workers)
        return sum(times) / len(times) * self.count if times else math.nan

    def tolerance(self, step: int) -> float:
        """The relative difference of a loss that rounding explains; 0 in exact mode."""
        return tolerance_at(step - self.begin, exact=self.settings.exact)


def plan_of(
    run: Run,
    first: int,
    last: int,
    *,
    workers: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> ReplayPlan:
    """Plan to compute the steps from `first` to `last` again.

    Args:
        run: the recorded run.
        first, last: steps, from 1.
        workers: ranks that compute. None: 1, or as many as were recorded, where their number is in
            the mathematics.
        device: auto, cpu or cuda.

    Raises:
        UsageError: a run that cannot be computed again, named with the reason.
    """
    _check_kind(run)
    warnings: list[str] = []
    start = _start_before(run, first, warnings)
    begin = start.step if start else 0
    workers = _workers(run, begin, last, workers)
    method = run.settings.method()
    settings = replace(
        run.settings,
        workers=workers,
        device=device,
        reduce=run.settings.reduce if workers == run.settings.workers else "auto",
        update="replicated" if method.update == "sharded" else method.update,
        threads=_threads(run, start) or run.settings.threads,
        mesh=None,
        balance=None,
        witness=None,
        log=(),
        checkpoints=None,
        checkpoint_every=None,
        grow=False,
        grow_if_wanted=False,
    )
    warnings += _changes(run, settings, start)
    return ReplayPlan(run=run, settings=settings, start=start, last=last, warnings=warnings)


def _check_kind(run: Run) -> None:
    if run.settings.is_script:
        raise UsageError("replay-of-a-script", run=str(run.path), script=run.settings.task)
    settings = run.settings
    if settings.method().server:
        raise UsageError("replay-of-a-server", run=str(run.path))
    if settings.mesh is not None and not settings.mesh.only_data:
        raise UsageError("replay-of-a-mesh", run=str(run.path), mesh=str(settings.mesh))


def _start_before(run: Run, first: int, warnings: list[str]) -> StartingCheckpoint | None:
    """Return the newest checkpoint before step `first` whose files are whole."""
    checkpoint = run.checkpoint_before(first)
    while checkpoint is not None:
        try:
            state = files.read(checkpoint.path).state
            return StartingCheckpoint(checkpoint.path.parent, checkpoint.step, state)
        except DamagedCheckpoint as error:
            warnings.append(f"{error}: an older checkpoint is used")
        checkpoint = run.checkpoint_before(checkpoint.step)
    return None


def _workers(run: Run, begin: int, last: int, asked: int | None) -> int:
    """Return the number of ranks that compute."""
    method = run.settings.method()
    if method.world_size_free:
        return asked or 1
    sizes = set()
    for record in run.steps:
        if begin < record.step <= last:
            sizes.add(len(record.samples_by_rank))
    if len(sizes) > 1:
        raise UsageError(
            "replay-of-several-sizes", method=method.describe(), sizes=sorted(sizes), begin=begin
        )
    size = sizes.pop()
    if asked not in (None, size):
        raise UsageError("replay-at-own-size", method=method.describe(), workers=size)
    return size


def _threads(run: Run, start: StartingCheckpoint | None) -> int | None:
    """Return the recorded number of intra-op threads of a rank."""
    recorded: Any = start.state.get("machine", {}) if start else {}
    for event in run.events:
        if not recorded and event.event == "start":
            recorded = event.values.get("machine", {})
    text = str(recorded.get("threads", ""))
    return int(text) if text.isdecimal() else None


def _changes(run: Run, settings: Settings, start: StartingCheckpoint | None) -> Iterator[str]:
    """Yield what has changed since the run: its task, and what the bits depend on besides it."""
    state: Mapping[str, Any] = start.state if start else {}
    checkpoints = iter(run.checkpoints)
    while not state:  # the digests of any checkpoint tell whether the task is the same
        checkpoint = next(checkpoints, None)
        if checkpoint is None:
            yield "the run has no checkpoint: whether its task has changed since cannot be told"
            return
        try:
            state = files.read(checkpoint.path).state
        except DamagedCheckpoint:
            continue
    task = load_task(settings)
    changed = changes(state.get("digests", {}), task_digests(task))
    if changed:
        since = f"step {state['step']}"
        yield f"the task has changed since {since} was saved: {'; '.join(changed)}"
    here = {name: value for name, value in machine().items() if name != "threads"}
    before = dict(state.get("machine", here))
    versions = run.start.get("versions", {})
    if "lockstep" in versions:
        before["lockstep"] = versions["lockstep"]
        here["lockstep"] = lockstep.__version__
    difference = differences(before, here)
    if difference:
        yield f"this machine differs, so the bits may differ as well: {difference}"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay."""

    steps: Sequence[ComputedStep]
    differing: str | None = None
    """The first tensor of the model that differs from the checkpoint it was compared with."""


def compute(plan: ReplayPlan, detail: Detail, compared: Path | None = None) -> ReplayResult:
    """Compute the steps of a plan again.

    Args:
        plan: what to compute.
        detail: which steps to look at, and how.
        compared: a checkpoint after the last step. The weights at the end are compared with it, bit
            for bit.
    """
    job = ReplayJob(
        settings=plan.settings,
        directory=plan.start.directory if plan.start else None,
        begin=plan.begin,
        detail=detail,
        compared=compared,
    )
    if plan.settings.workers == 1:
        return job()  # in this process, which has the terminal for a debugger
    ranks = lockstep.launch(job, plan.settings.workers)
    steps = merged([rank.steps for rank in ranks], detail.samples)
    return ReplayResult(steps, ranks[0].differing)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayJob:
    """What each rank computes."""

    settings: Settings
    directory: Path | None
    """The run's folder of checkpoints. None: begin with the seed."""
    begin: int
    """The step whose checkpoint is loaded."""
    detail: Detail
    compared: Path | None

    def __call__(self) -> ReplayResult:
        with rebuilt(self.settings) as training:
            if self.directory is not None:
                self._load(training, self.directory)
            steps = list(Replay(training).steps(self.detail))
            differing = None
            if self.compared is not None and training.world.rank == 0:
                differing = _first_difference(training.model, files.read(self.compared).tensors)
            return ReplayResult(steps, differing)

    def _load(self, training: AssembledTraining, directory: Path) -> None:
        try:
            training.load(directory, self.begin)
        except UsageError as error:
            if error.code != "another-training":
                raise
            differences = error.values["differences"]
            raise UsageError(
                "replay-of-another-task", step=self.begin, differences=differences
            ) from None


def _first_difference(model: nn.Module, saved: Mapping[str, Tensor]) -> str | None:
    tensors = tensors_of(model)
    for name, tensor in saved.items():
        if name in tensors and not torch.equal(tensors[name].cpu(), tensor):
            return name
    return None


def merged(ranks: Sequence[Sequence[ComputedStep]], most: int) -> list[ComputedStep]:
    """Return each step with the micro-batches of all ranks, and `most` of their samples."""
    steps = []
    for parts in zip(*ranks, strict=True):
        micro_batches: list[ReplayedMicroBatch] = []
        samples = []
        notes: dict[str, None] = {}
        for part in parts:
            micro_batches += part.micro_batches
            samples += part.samples
            notes |= dict.fromkeys(part.notes)
        samples.sort(key=lambda sample: -math.inf if math.isnan(sample.loss) else -sample.loss)
        steps.append(
            replace(
                parts[0],
                micro_batches=sorted(micro_batches, key=lambda one: one.slot),
                samples=samples[:most],
                notes=list(notes),
            )
        )
    return steps


@dataclass(frozen=True, slots=True)
class Comparison:
    """A recorded loss beside the one that was computed again."""

    recorded: float
    computed: float
    tolerance: float

    @property
    def same(self) -> bool:
        """Whether the bits are equal."""
        return self.recorded == self.computed or (
            math.isnan(self.recorded) and math.isnan(self.computed)
        )

    @property
    def relative(self) -> float:
        """The difference over the recorded loss."""
        difference = abs(self.recorded - self.computed)
        return difference / abs(self.recorded) if self.recorded else difference

    @property
    def reproduced(self) -> bool:
        """Whether they are equal, or rounding explains the difference."""
        return self.same or self.relative <= self.tolerance


def compare(plan: ReplayPlan, step: ComputedStep) -> Comparison | None:
    """Compare a step's loss with the recorded one; None if that step was not recorded."""
    record = plan.run.step(step.step)
    if record is None:
        return None
    return Comparison(record.loss, step.loss, plan.tolerance(step.step))


def ranks_by_slot(run: Run, step: ComputedStep) -> dict[int, int]:
    """Return the rank that had each micro-batch of a step in the recorded run, by slot; empty if the
    step was not recorded. Ranks have contiguous micro-batches, in their order.
    """
    record = run.step(step.step)
    if record is None:
        return {}
    ends = list(itertools.accumulate(record.samples_by_rank))
    ranks = {}
    samples = 0
    for micro_batch in step.micro_batches:
        ranks[micro_batch.slot] = bisect.bisect_right(ends, samples)
        samples += micro_batch.samples
    return ranks
