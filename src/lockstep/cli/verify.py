"""`lockstep verify`: check that a task gives the same result at any number of workers, or explain
the first difference; or compare two finished runs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import nodes as many
from lockstep.cli.arguments import JsonFile, counts_of, existing_run, fitted, task_of
from lockstep.cli.choices import Cluster, RunChoice
from lockstep.cli.completion import tasks
from lockstep.cli.options import GivenNames, Only, Says, option_name
from lockstep.config.settings import Config, Settings
from lockstep.errors import ExitCode, UsageError
from lockstep.runtime.streams import plain
from lockstep.tools.timing.output_files import write_json

if TYPE_CHECKING:
    from lockstep.tools.verify.judge import Verified

COMMAND = many.Command
_COUNTS = "1,2,3"
_STEPS = 5


def verify(
    what: Annotated[
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
        Says("steps", help=f"Number of optimizer steps to compare. Default: {_STEPS}."),
    ],
    choice: Annotated[RunChoice, Only("overrides")],
    cluster: Annotated[Cluster, Only("ray")],
    given: GivenNames,
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
    if len(what) == 2:
        _refuse_with_runs(given - {"what", "json"})
        _runs(existing_run(Path(what[0])), existing_run(Path(what[1])), json)
        return
    if len(what) != 1:
        raise UsageError("task-or-two-runs", given=f"{len(what)} arguments")
    settings, counts = _settings(
        what[0], workers, config, choice.overrides, fits_here=cluster.ray is None
    )
    start = (
        {}
        if cluster.ray is None
        else {
            "start": many.calling_on_ray(cluster.ray, settings.task, many.gpus_for(settings.device))
        }
    )
    from lockstep.tools.verify.judge import verify as look
    from lockstep.training.resolve import resolve

    # mistakes in the task are errors here, before any rank starts
    name = resolve(settings.task, settings.overrides).name or "task"
    verdict = look(
        settings, counts, say=lambda line: print(line, file=sys.stderr, flush=True), **start
    )
    write_json(json, {"task": name, **verdict.as_json()})
    print(_table(verdict))
    print(_last_line(name, verdict, counts, settings.steps or _STEPS))
    if verdict.equal_noise is not None:
        one, other = verdict.equal_noise
        print(
            f"verify: {name} gives samples {one} and {other} the same noise: after both a generator"
            " is in the same state\nlikely cause: the data set seeds a global generator. Remove"
            " manual_seed or random.seed from it: Lockstep seeds torch, numpy.random and random"
            " for every sample"
        )
    if not verdict.correct:
        raise typer.Exit(ExitCode.FAILED)


def _settings(
    task: str,
    workers: str | None,
    config: Config,
    override: Mapping[str, str],
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
    place, overrides = task_of(task, override)
    steps = _STEPS if config.steps is None else config.steps
    settings = Settings.of(
        replace(config, steps=steps), task=place, overrides=overrides, workers=max(counts)
    )
    return fitted(settings, count_workers=False) if fits_here else settings, counts


def _refuse_with_runs(given: Collection[str]) -> None:
    if given:
        raise UsageError(
            "options-exclude-each-other",
            one=", ".join(sorted(map(option_name, given))),
            other="RUN_A RUN_B",
            reason="comparing two runs trains nothing",
        )


def _runs(one: Path, other: Path, json: Path | None) -> None:
    from lockstep.tools.verify.finished_runs import differences, summary  # imports torch

    found = differences(one, other)
    write_json(json, {"runs": [str(one), str(other)], "same": not found, "differences": found})
    if not found:
        print(f"verify: {one} and {other} are equal, bit for bit: {summary(one)}")
        return
    print(f"verify: {one} and {other} differ")
    for sentence in found:
        print(plain(f"  {sentence}"))
    raise typer.Exit(ExitCode.FAILED)


def _table(verdict: Verified) -> str:
    from lockstep.tools.timing.output_files import table

    words = {True: "same" if verdict.exact else "agrees", False: "differs"}
    rows = [
        [
            row.workers,
            row.steps,
            f"{row.loss:.9g}",
            row.sha256[:16],
            words[row.same] if number else "",
        ]
        for number, row in enumerate(verdict.rows)
    ]
    return table("workers | steps | loss at the end | weights sha256 | ", rows, left=())


def _last_line(name: str, verdict: Verified, counts: list[int], steps: int) -> str:
    if verdict.difference is not None:
        return (
            f"verify: {name} differs. First difference: {verdict.where}\nlikely cause:"
            f" {verdict.why}"
        )
    what = "gives the same bits" if verdict.exact else "gives the same values within rounding"
    among = (
        f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} workers ({steps}"
        f" step{'s' * (steps != 1)})"
    )
    if not verdict.amplified:
        return f"verify: {name} {what} on {among}"
    found = verdict.amplified[0]
    one, other = found.workers
    return (
        f"rounding, amplified: from step {found.step} on, {found.name or 'the loss'} differs by"
        f" more than rounding usually does between {one} and {other} workers. Trained with exact,"
        f" they give the same bits, so the order of addition is the only cause\nverify: {name}"
        f" {what} on {among}"
    )
