"""Arguments and options that several commands share, and the checks of them that run before torch
is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

import typer

from lockstep.cli.completion import tasks
from lockstep.config.knob import whole
from lockstep.config.settings import Settings
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.launcher.supervise import Outcome

TaskName = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        autocompletion=tasks,
        help="Bundled task (digits, text), or a Python file whose task() returns a lockstep.Task.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-n",
        metavar="N",
        help="Number of ranks on this host. Default: the number of GPUs, else 1.",
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON."),
]


def task_of(task: str, overrides: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the task's name or path and the values of --set. Raises TaskError or UsageError if the task's
    file already shows a mistake.
    """
    from lockstep.training.resolve import located

    return located(task, overrides), dict(overrides)


def at_least_one(**options: int | None) -> None:
    """Raise UsageError for an option below 1. Options have their Python names; None means not
    given.
    """
    for name, value in options.items():
        if value is not None:
            whole(name, value)


def counts_of(text: str, expected: str, least: int = 1) -> list[int]:
    """Parse `1,2,4`: at least `least` numbers of ranks. `expected` is a text for the error."""
    parts = [part.strip() for part in text.split(",")]
    counts = [int(part) for part in parts if part.isdecimal()]
    if len(counts) < max(least, len(parts)) or 0 in counts:
        raise UsageError("wrong-value", name="workers", value=text, expected=expected)
    return counts


# -- ranks on this host --------------------------------------------------------------------------


def fitted(settings: Settings, *, count_workers: bool) -> Settings:
    """Return the settings with one rank per GPU if `count_workers`. On a host with GPUs no two
    ranks share one, and no rank uses the CPU unless the user asks for it.
    """
    if settings.device == "cpu":
        return settings
    from lockstep.launcher import start

    gpus = start.gpus()
    if settings.device == "cuda" and not gpus:
        raise UsageError("no-gpu-here")
    workers = gpus or 1 if count_workers else settings.workers
    if gpus and workers > gpus:
        raise UsageError("too-few-gpus", workers=workers, gpus=gpus)
    return replace(settings, workers=workers)


def fitted_to(workers: int | None, **settings: Any) -> Settings:
    """Return settings with `workers` ranks. None means one rank per GPU, or one without GPUs."""
    if workers is None:
        return fitted(Settings(workers=1, **settings), count_workers=True)
    return fitted(Settings(workers=workers, **settings), count_workers=False)


def answer_of(outcome: Outcome, file: Path, task: str) -> dict[str, Any]:
    """Return what rank 0 has written. If the ranks failed, exit with their exit code."""
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
    if not file.exists():
        raise UsageError("task-ended-its-process", task=task)
    answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return answer


# -- `latest`: the newest run, for commands that read one -----------------------------------------

_LATEST = Path("latest")
_RUNS = Path("runs")


@overload
def run_of(run: Path) -> Path: ...
@overload
def run_of(run: Path | None) -> Path | None: ...
def run_of(run: Path | None) -> Path | None:
    """Return the run directory. `latest` means the run under runs/ that was started or resumed
    last, unless a directory has that name.

    Raises UsageError if there is no run.
    """
    if run != _LATEST or run.exists():
        return run
    files = [file for file in _RUNS.glob("*/settings.json") if file.is_file()]
    if not files:
        raise UsageError("latest-run-missing", runs=_RUNS, folder=Path.cwd())
    return max(files, key=lambda file: file.stat().st_mtime_ns).parent


def existing_run(run: Path) -> Path:
    """Return the run directory, also for `latest`. Raises UsageError if it does not exist."""
    run = run_of(run)
    if not run.is_dir():
        reason = "there is no such directory"
        if not run.is_absolute():
            reason += f" in {Path.cwd()}"
        raise UsageError(
            "not-a-run-directory", directory=str(run), file="settings.json", reason=reason
        )
    return run


def new_run(run: Path | None) -> Path | None:
    """Return the directory unchanged, for a training that may start there. Raises UsageError for
    `latest`.
    """
    if run == _LATEST:
        raise UsageError(
            "option-missing",
            option="--run latest",
            needed="--resume",
            reason="latest names a run that is there already",
        )
    return run
