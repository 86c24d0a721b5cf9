"""`lockstep verify`: check that a task gives the same result at any number of workers, or explain
the first difference; or compare two finished runs.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import nodes
from lockstep.cli.arguments import JsonFile, counts_of, existing_run, fitted, task_of
from lockstep.cli.choices import Cluster, RunChoice
from lockstep.cli.completion import tasks
from lockstep.cli.options import GivenNames, KnobHelp, Only, option_name
from lockstep.config.settings import Config, Settings
from lockstep.data.windows import counted
from lockstep.errors import ExitCode, UsageError
from lockstep.launcher.launch import start_ranks
from lockstep.launcher.start import FOR_TRAININGS
from lockstep.runtime.streams import plain
from lockstep.tools.timing.output_files import write_json

if TYPE_CHECKING:
    from lockstep.tools.verify.judge import Verified

COMMAND = nodes.Command
_COUNTS = "1,2,3"
_STEPS = 5


def verify(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK | RUN_A RUN_B",
            autocompletion=tasks,
            help="A task, as for `lockstep train`, or two run directories of the same task.",
        ),
    ],
    config: Annotated[
        Config,
        Only("steps", "exact", "device", "reduce", "update"),
        KnobHelp("steps", help=f"Number of optimizer steps to compare. Default: {_STEPS}."),
    ],
    choice: Annotated[RunChoice, Only("overrides")],
    cluster: Annotated[Cluster, Only("ray")],
    names: GivenNames,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N,N...",
            help=f"Numbers of ranks to compare. Default: {_COUNTS}.",
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Train TASK at several numbers of workers and compare every step, or compare two runs.

    If the trainings differ, it prints the first step, micro-batch and parameter that differ, and the
    likely cause. It writes no run directory and does not evaluate. For RUN_A RUN_B it compares
    metrics and weights, bit for bit. The exit code is 1 if something differs, or if the data set of
    TASK gives samples the same noise.

    \b
    Examples:
      lockstep verify digits --workers 1,2           compare training on 1 and 2 ranks
      lockstep verify my_task.py -n 1,4 --exact      the same, with exact mode
      lockstep verify runs/a runs/b                  compare two finished runs
    """
    if len(targets) == 2:
        _refuse_with_runs(names - {"targets", "json"})
        first, second = map(Path, targets)
        _runs(existing_run(first), existing_run(second), json)
        return
    if len(targets) != 1:
        raise UsageError("task-or-two-runs", given=f"{len(targets)} arguments")
    settings, counts = _settings(
        targets[0], workers, config, choice.overrides, fits_here=cluster.ray is None
    )
    start: dict[str, Any] = {"start": partial(start_ranks, imports=FOR_TRAININGS)}
    if cluster.ray is not None:
        gpus = nodes.gpus_for(settings.device)
        start["start"] = nodes.calling_on_ray(cluster.ray, settings.task, gpus)
    from lockstep.tools.verify import judge
    from lockstep.training.resolve import resolve

    # mistakes in the task are errors here, before any rank starts
    task = resolve(settings.task, settings.overrides).name or "task"
    verdict = judge.verify(settings, counts, say=_print_progress, **start)
    write_json(json, {"task": task, **verdict.as_json()})
    print(_table(verdict))
    print(_last_line(task, verdict, counts, settings.steps or _STEPS))
    if verdict.equal_noise is not None:
        print(_equal_noise(task, *verdict.equal_noise))
    if not verdict.correct:
        raise typer.Exit(ExitCode.FAILED)


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _equal_noise(task: str, first: int, second: int) -> str:
    return (
        f"verify: {task} gives samples {first} and {second} the same noise: after both a generator"
        " is in the same state\nlikely cause: the data set seeds a global generator. Remove"
        " manual_seed or random.seed from it: Lockstep seeds torch, numpy.random and random"
        " for every sample"
    )


def _settings(
    task: str,
    workers: str | None,
    config: Config,
    overrides: Mapping[str, str],
    *,
    fits_here: bool,
) -> tuple[Settings, list[int]]:
    """Return settings for the largest of the counts, and all counts. `fits_here` says that the
    ranks run on this host.
    """
    if Path(task).is_dir():
        raise UsageError("task-or-two-runs", given=f"the folder {task}")
    counts = counts_of(
        _COUNTS if workers is None else workers,
        'at least two whole numbers of at least 1, such as 1,2,4 ("2,2" trains the same twice)',
        least=2,
    )
    task, overrides = task_of(task, overrides)
    config = replace(config, steps=_STEPS if config.steps is None else config.steps)
    settings = Settings.of(config, task=task, overrides=overrides, workers=max(counts))
    if fits_here:
        settings = fitted(settings, count_workers=False)
    return settings, counts


def _refuse_with_runs(names: Collection[str]) -> None:
    """Raise UsageError for options of a training."""
    if names:
        raise UsageError(
            "options-exclude-each-other",
            one=", ".join(sorted(map(option_name, names))),
            other="RUN_A RUN_B",
            reason="comparing two runs trains nothing",
        )


def _runs(first: Path, second: Path, json: Path | None) -> None:
    from lockstep.tools.verify import finished_runs  # imports torch

    compared = finished_runs.differences(first, second)
    runs = [str(first), str(second)]
    write_json(
        json,
        {
            "runs": runs,
            "same": not compared.sentences,
            "differences": compared.sentences,
            "step": compared.step,
        },
    )
    if not compared.sentences:
        summary = finished_runs.summary(first)
        print(f"verify: {first} and {second} are equal, bit for bit: {summary}")
        return
    print(f"verify: {first} and {second} differ")
    for sentence in compared.sentences:
        print(plain(f"  {sentence}"))
    if compared.step is not None:
        for run in (first, second):
            print(f"look at it: lockstep replay {shlex.quote(str(run))} --step {compared.step}")
    raise typer.Exit(ExitCode.FAILED)


def _table(verdict: Verified) -> str:
    from lockstep.tools.timing.output_files import table

    same = "same" if verdict.exact else "agrees"
    rows: list[list[object]] = []
    for row in verdict.rows:
        comparison = same if row.same else "differs"
        rows.append([row.workers, row.steps, f"{row.loss:.9g}", row.sha256[:16], comparison])
    rows[0][-1] = ""  # the others are compared with the first one
    return table("workers | steps | loss at the end | weights sha256 | ", rows, left=())


def _last_line(name: str, verdict: Verified, counts: list[int], steps: int) -> str:
    if verdict.difference is not None:
        return (
            f"verify: {name} differs. First difference: {verdict.where}\nlikely cause:"
            f" {verdict.why}"
        )
    same = "gives the same bits" if verdict.exact else "gives the same values within rounding"
    line = (
        f"verify: {name} {same} on {', '.join(map(str, counts[:-1]))} and {counts[-1]} workers"
        f" ({counted(steps, 'step')})"
    )
    if not verdict.amplified:
        return line
    first = verdict.amplified[0]
    one, other = first.workers
    return (
        f"rounding, amplified: from step {first.step} on, {first.name or 'the loss'} differs by"
        f" more than rounding usually does between {one} and {other} workers. Trained with exact,"
        f" they give the same bits, so the order of addition is the only cause\n{line}"
    )
