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
from lockstep.training.timeline import Anatomy
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
    anatomy: Anatomy | None
    whole: bool
    """Whether all records could be read. Unreadable ones are left out."""

    @property
    def start(self) -> Mapping[str, Any]:
        """The record of the latest start of the ranks; empty if there is none."""
        return next((event for event in reversed(self.events) if event.get("event") == "start"), {})


def read(run: Path) -> Recorded:
    """Read the run directory. Raises UsageError if it has no settings."""
    settings = Settings.read(run)
    lines = _text(run / METRICS).splitlines()
    found = [_mapping(line) for line in lines]
    records = [record for record in found if record is not None and "kind" in record]
    result = _mapping(_text(run / RESULT))
    return Recorded(
        run=run,
        state=(
            "finished"
            if result is not None
            else "under way"
            if in_use(run / "lock")
            else "interrupted"
        ),
        settings=settings,
        steps=[
            record
            for record in records
            if record["kind"] == "step" and _has(record, "loss", "samples_per_s")
        ],
        evaluations=[
            record
            for record in records
            if record["kind"] == "evaluate"
            and _has(record)
            and isinstance(record.get("metrics"), dict)
        ],
        events=[
            record
            for record in records
            if record["kind"] == "event" and isinstance(record.get("event"), str)
        ],
        result=result,
        anatomy=read_anatomy(run),
        whole=None not in found and (run / METRICS).exists(),
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
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _has(record: Mapping[str, Any], *names: str) -> bool:
    step = record.get("step")
    return (
        type(step) is int
        and 0 <= step < 2**53
        and all(
            not math.isnan(number(record.get(name))) or record.get(name) == "nan" for name in names
        )
    )
