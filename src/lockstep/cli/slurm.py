"""`lockstep slurm`: a batch script for a task or a script, printed or submitted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.batch_script import BatchJob, SlurmOptions, batch_script, limit
from lockstep.errors import ExitCode, UsageError


def slurm(
    options: SlurmOptions,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TASK|SCRIPT",
            help="As for lockstep train; a file without task() is a script, as for lockstep run.",
        ),
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGS]",
            show_default=False,
            help="After --: options of lockstep train, or arguments of the script.",
        ),
    ] = None,
    log: Annotated[
        Path, typer.Option(metavar="DIR", help="Where slurm-JOBID.log is written; it is made.")
    ] = Path("logs"),
    job_name: Annotated[
        str | None,
        typer.Option(show_default=False, help="Default: the task's or the script's name."),
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit/--print", help="Hand it to sbatch, or print it.")
    ] = False,
) -> None:
    """Write a batch script that runs TASK or SCRIPT with one SLURM task a rank, and submit it or
    print it.

    Shortly before its time limit, and when it must make room, the job saves, goes back into the
    queue, and goes on where it was. Its run directory carries the job's id: runs/NAME-JOBID. The
    ranks use the Python that runs this command.
    """
    name, command, run = _command(target, args or [])
    job = BatchJob(
        **asdict(options),
        job_name=name if job_name is None else job_name,
        command=command,
        log=str(log.absolute()),
        run=run,
    )
    text = batch_script(job)
    _make(log)
    if not submit:
        print(text, end="")
        return
    number = _sbatch(text)
    line = (
        f"submitted job {number}: {job.nodes * job.workers_per_node} ranks for {limit(job.time)} at"
        f" most; log {job.log}/slurm-{number}.log"
    )
    print(line + ("" if run is None else f", run directory {run}-{number}"))


def _command(target: str, args: list[str]) -> tuple[str, list[str], str | None]:
    """The job's name, what each task runs, and the beginning of its run directory's name where
    it shall have one.
    """
    from lockstep.training.resolve import BUNDLED, declares_task, located, short_name

    lockstep = [sys.executable, "-P", "-m", "lockstep"]
    path = Path(target).expanduser()
    if target not in BUNDLED and path.is_file() and not declares_task(path):
        return path.stem, [*lockstep, "run", str(path.absolute()), *args], None
    place = located(target)
    name = short_name(place)
    chosen = _run_of(args)
    run = None if chosen is not None else str(Path("runs", name).absolute())
    return name, [*lockstep, "train", place, *args], run


def _run_of(args: list[str]) -> Path | None:
    """The --run among the options of `lockstep train`. Mistakes are refused here: a job may wait
    for days before it finds one.
    """
    from lockstep.cli.options import spread
    from lockstep.cli.refusals import REFUSED, of_parser
    from lockstep.cli.train import train

    app = typer.Typer(add_completion=False)
    app.command()(spread(train))
    if "--help" in args:
        raise UsageError(
            "option-not-for-a-job",
            option="--help",
            reason="it trains nothing; see `lockstep train --help`",
        )
    try:
        context = typer.main.get_command(app).make_context("lockstep train", ["TASK", *args])
    except REFUSED as error:
        raise of_parser(error, args).within("after --") from None
    for option in ("workers", "max_restarts"):
        if context.params[option] is not None:
            raise UsageError(
                "option-not-for-a-job",
                option=f"--{option.replace('_', '-')} {context.params[option]}",
                reason="--nodes and --workers-per-node say how many ranks there are, and the queue"
                " restarts the job",
            )
    run: Path | None = context.params["run"]
    return run


def _make(log: Path) -> None:
    try:
        log.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "cannot-make-folder", option="--log", folder=log, reason=error.strerror
        ) from None


def _sbatch(text: str) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UsageError("no-sbatch") from None
    if done.returncode:
        print(f"error: sbatch has refused the job: {done.stderr.strip()}", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED)
    return done.stdout.strip().partition(";")[0]
