"""Reads a run directory for `report` and `verify`, whether or not the run has finished."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.config.settings import Settings
from lockstep.training.run_directory import METRICS, RESULT
from lockstep.training.timeline import Timeline
from lockstep.training.timeline import read as read_anatomy

State = Literal["finished", "under way", "interrupted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The records of a run, as they were written, by kind."""

    run: Path
    state: State
    settings: Settings
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any] | None
    anatomy: Timeline | None
    complete: bool
    """Whether all records could be read. Unreadable ones are left out."""

    @property
    def start(self) -> Mapping[str, Any]:
        """The record of the latest start of the ranks; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == "start"), {})


def read(run: Path) -> Recorded:
    """Read the run directory. Raises UsageError if it has no settings."""
    settings = Settings.read(run)
    parsed = list(map(_mapping, _text(run / METRICS).splitlines()))
    records = [record for record in parsed if record is not None]
    evaluations = [record for record in records if _has(record, "evaluate")]
    events = [record for record in records if record.get("kind") == "event"]
    result = _mapping(_text(run / RESULT))
    state: State = "interrupted"
    if result is not None:
        state = "finished"
    elif in_use(run / "lock"):
        state = "under way"
    return Recorded(
        run=run,
        state=state,
        settings=settings,
        steps=[record for record in records if _has(record, "step", "loss", "samples_per_s")],
        evaluations=[record for record in evaluations if isinstance(record.get("metrics"), dict)],
        events=[event for event in events if isinstance(event.get("event"), str)],
        result=result,
        anatomy=read_anatomy(run),
        complete=None not in parsed and (run / METRICS).exists(),
    )


def number(value: Any) -> float:
    """Return a number of metrics.jsonl, where nan and infinities are strings. nan if `value` is no
    number.
    """
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def in_use(lock: Path) -> bool:
    """Whether a training holds the run's `lock` file."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _mapping(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _has(record: Mapping[str, Any], kind: str, *names: str) -> bool:
    """Whether a record is of this kind and has a step and these numbers."""
    step = record.get("step")
    if record.get("kind") != kind or type(step) is not int or not 0 <= step < 2**53:
        return False
    values = [record.get(name) for name in names]
    return all(value == "nan" or not math.isnan(number(value)) for value in values)
