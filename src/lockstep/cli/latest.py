"""`--run latest`: the newest run, for commands that read one."""

from __future__ import annotations

from pathlib import Path
from typing import overload

from lockstep.errors import UsageError

_NAME, _RUNS = Path("latest"), Path("runs")


@overload
def run_of(run: Path) -> Path: ...
@overload
def run_of(run: Path | None) -> Path | None: ...
def run_of(run: Path | None) -> Path | None:
    """The directory that is meant: for `latest`, unless there is one of that name, the run under
    runs/ that was begun or resumed last.

    Raises UsageError where there is none.
    """
    if run != _NAME or run.exists():
        return run
    found = [file for file in _RUNS.glob("*/settings.json") if file.is_file()]
    if not found:
        raise UsageError("latest-run-missing", runs=_RUNS, folder=Path.cwd())
    return max(found, key=lambda file: file.stat().st_mtime_ns).parent


def existing(run: Path) -> Path:
    """The run directory that is meant. Raises UsageError where there is none."""
    found = run_of(run)
    if not found.is_dir():
        raise UsageError("no-such-run", run=found, folder=Path.cwd())
    return found


def refused(run: Path | None) -> Path | None:
    """The directory as it is, for a training that may begin there. Raises UsageError for
    `latest`.
    """
    if run == _NAME:
        raise UsageError(
            "option-missing",
            option="--run latest",
            needed="--resume",
            reason="latest names a run that is there already",
        )
    return run
