"""Read the files of a run directory into a `Run`. The files may come from a killed process, another
version, or anywhere: a record that does not fit is left out.
"""

from __future__ import annotations

import fcntl
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.checkpoints.folders import best_name, size_of, step_of, written
from lockstep.checkpoints.manifest import MANIFEST
from lockstep.config.settings import FILE, Settings
from lockstep.errors import UsageError
from lockstep.runtime.disk import last_lines
from lockstep.training.run_directory import METRICS, RESULT
from lockstep.training.timeline import Timeline
from lockstep.training.timeline import read as read_timeline

MOST = 256 * 2**20  # bytes of metrics.jsonl
_LARGEST = 2**20  # bytes of settings.json and of result.json
_NUMBERS = ("loss", "weight", "lr", "samples_per_s")
_OTHERS = ("kind", "step", "epoch", "samples_by_rank", "grad_norm", "bytes_sent")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step. Numbers that were not recorded are nan or None."""

    step: int
    """The number of the step, from 1."""
    epoch: int
    """The number of the epoch, from 1."""
    loss: float
    """The weighted mean loss of the global batch, before the update."""
    weight: float
    """The sum of weights of the global batch."""
    samples_by_rank: tuple[int, ...]
    lr: float
    """The learning rate of the first parameter group."""
    grad_norm: float | None
    """The norm of the gradient before clipping; None without `clip`."""
    samples_per_s: float
    """Samples a second over all ranks, without evaluations."""
    bytes_sent: int | None
    """Bytes that rank 0 has sent in this step."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """All other fields of the record, as JSON: what `lockstep.log` has logged, for example."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation, after `step` steps."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened: a start, a restart, a skipped step."""

    event: str
    """Its name, such as "start", "resumed" or "step skipped"."""
    step: int | None
    line: str
    """The sentence that was printed; "" if none was."""
    values: Mapping[str, Any]
    """All other fields, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint of the run. Its files are not verified: `lockstep checkpoints verify` does that."""

    step: int
    """Optimizer steps that were taken before it was saved."""
    path: Path
    model: int
    """The number of the model, from 1. A script that trains several models saves each of them."""
    bytes: int
    time: float
    """When it was completed, in seconds since 1970."""
    best: bool
    """Whether it has the best metric so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The records of a run."""

    path: Path
    state: Literal["finished", "under way", "interrupted"]
    settings: Settings
    steps: Sequence[StepRecord]
    """One record a step, in order. If a step was trained again, this is the last record."""
    evaluations: Sequence[Evaluation]
    """As they were written."""
    events: Sequence[Event]
    """As they were written."""
    result: Mapping[str, Any] | None
    """The contents of result.json; None if the training has not ended."""
    checkpoints: Sequence[CheckpointRecord]
    """The checkpoints on disk, oldest step first."""
    timeline: Timeline | None
    """Where the time of the steps went; None if no rank has recorded it."""
    complete: bool
    """Whether metrics.jsonl was there and was read from the beginning, without unreadable records."""

    @property
    def task_name(self) -> str:
        """The task's name: the bundled one, or its file's without the ending."""
        return Path(self.settings.task).stem

    @property
    def start(self) -> Mapping[str, Any]:
        """The values of the latest start of the ranks; empty if there is none."""
        for event in reversed(self.events):
            if event.event == "start":
                return event.values
        return {}

    def step(self, number: int) -> StepRecord | None:
        """Return the record of step `number`; None if it was not recorded."""
        index = bisect_left(self.steps, number, key=lambda record: record.step)
        if index < len(self.steps) and self.steps[index].step == number:
            return self.steps[index]
        return None

    def checkpoint_before(self, step: int) -> CheckpointRecord | None:
        """Return the newest checkpoint of the first model that was saved before `step` was trained;
        None if there is none: the training begins from its seed.
        """
        before = None
        for checkpoint in self.checkpoints:
            if checkpoint.model == 1 and checkpoint.step < step:
                before = checkpoint
        return before


def read(path: Path | str) -> Run:
    """Read the run directory `path`. It is only read, also on a read-only disk.

    Of metrics.jsonl at most the last 256 MiB are read: about a million steps, which take about
    0.6 GB of memory. Lines of more than 1 MiB are left out.

    Args:
        path: the directory, of a run in any state.

    Returns:
        The run.

    Raises:
        UsageError: `path` is not a run directory, or its settings are of another version.
    """
    path = Path(path)
    _check_size(path)
    settings = Settings.read(path)
    metrics = path / METRICS
    steps: dict[int, StepRecord] = {}
    evaluations = []
    events = []
    complete = metrics.is_file() and metrics.stat().st_size <= MOST
    for line in last_lines(metrics, MOST):
        record = _parsed(line)
        if record is None:
            complete = False
        elif isinstance(record, StepRecord):
            steps[record.step] = record
        elif isinstance(record, Evaluation):
            evaluations.append(record)
        elif isinstance(record, Event):
            events.append(record)
    result = _result(path / RESULT)
    state: Literal["finished", "under way", "interrupted"] = "interrupted"
    if result is not None:
        state = "finished"
    elif _in_use(path / "lock"):
        state = "under way"
    return Run(
        path=path,
        state=state,
        settings=settings,
        steps=[steps[step] for step in sorted(steps)],
        evaluations=evaluations,
        events=events,
        result=result,
        checkpoints=_checkpoints(path),
        timeline=read_timeline(path),
        complete=complete,
    )


def number(value: Any) -> float:
    """Return a number of metrics.jsonl, where nan and infinities are strings.

    Args:
        value: as JSON has it. What is not a number is nan.
    """
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _check_size(path: Path) -> None:
    """Raise UsageError for a settings.json that could block the reader or fill its memory."""
    file = path / FILE
    reason = ""
    if file.exists() and not file.is_file():
        reason = "it is not a regular file"
    elif file.exists() and file.stat().st_size > _LARGEST:
        reason = f"it has more than {_LARGEST} bytes"
    if reason:
        raise UsageError("not-a-run-directory", directory=str(path), file=FILE, reason=reason)


def _parsed(line: bytes) -> StepRecord | Evaluation | Event | dict[str, Any] | None:
    """Parse a line of metrics.jsonl. A record of an unknown kind is returned as it is; None: the line
    is damaged.
    """
    try:
        record: Any = json.loads(line)
        kind = record["kind"]
        if kind == "step":
            return _step(record)
        if kind == "evaluate":
            metrics = {name: number(value) for name, value in record["metrics"].items()}
            return Evaluation(
                step=_count(record["step"]),
                epoch=_count(record.get("epoch", 0)),
                metrics=metrics,
                seconds=number(record.get("seconds")),
            )
        if kind == "event":
            return _event(record)
        return dict(record)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _step(record: dict[str, Any]) -> StepRecord:
    numbers = {name: number(record.get(name)) for name in _NUMBERS}
    for name in ("loss", "samples_per_s"):
        if math.isnan(numbers[name]) and record.get(name) != "nan":
            raise ValueError(f"{name} is no number")
    grad_norm = record.get("grad_norm")
    bytes_sent = record.get("bytes_sent")
    return StepRecord(
        step=_count(record["step"]),
        epoch=_count(record.get("epoch", 0)),
        samples_by_rank=tuple(map(_count, record.get("samples_by_rank", ()))),
        grad_norm=None if grad_norm is None else number(grad_norm),
        bytes_sent=None if bytes_sent is None else _count(bytes_sent),
        more={name: record[name] for name in record.keys() - {*_NUMBERS, *_OTHERS}},
        **numbers,
    )


def _event(record: dict[str, Any]) -> Event:
    name = record.pop("event")
    if not isinstance(name, str):
        raise TypeError(f"an event {name!r}")
    del record["kind"]
    step = record.pop("step", None)
    return Event(
        event=name,
        step=None if step is None else _count(step),
        line=str(record.pop("line", "")),
        values=record,
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is no count")
    return value


def _result(file: Path) -> dict[str, Any] | None:
    """Return the contents of result.json; None if it is not there, or not as we write it."""
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return None
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _in_use(lock: Path) -> bool:
    """Whether a training holds the run's `lock` file."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _checkpoints(path: Path) -> list[CheckpointRecord]:
    records = []
    for directory in path.glob("checkpoints*"):
        suffix = directory.name.removeprefix("checkpoints").removeprefix("-")
        if suffix and not suffix.isdecimal():
            continue
        best = best_name(directory)
        for folder in written(directory):
            try:
                time = (folder / MANIFEST).stat().st_mtime
                size = size_of(folder)
            except OSError:
                continue  # damaged, or the training has just removed it
            record = CheckpointRecord(
                step=step_of(folder),
                path=folder,
                model=int(suffix or 1),
                bytes=size,
                time=time,
                best=folder.name == best,
            )
            records.append(record)
    return sorted(records, key=lambda record: (record.step, record.model))
