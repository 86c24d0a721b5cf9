"""`lockstep slurm`: write a batch script for a task or a script, and print or submit it.

The batch script is a pure function of the options. Every word from the user is quoted for the
shell. Only the lines of --setup are not quoted, because they are shell code.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.completion import tasks
from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.errors import ExitCode, UsageError

SIGNAL_SECONDS = 120  # before the time limit; SLURM may be up to 60 s early
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """The options of a SLURM job."""

    nodes: Annotated[int, Knob("cluster", unit="N", least=1)] = 1
    """Number of hosts."""
    workers_per_node: Annotated[int, Knob("cluster", unit="N", least=1)] = 1
    """Number of ranks on each host. Each rank is one SLURM task."""
    time: Annotated[str, Knob("cluster", unit="LIMIT")] = "1:00:00"
    """Time limit: minutes (90), hours:minutes:seconds (1:30:00), or days-hours (2-12). 1:00 is one minute."""
    partition: Annotated[str | None, Knob("cluster", unit="NAME", default="the cluster's")] = None
    """Partition of the job."""
    account: Annotated[str | None, Knob("cluster", unit="NAME", default="yours")] = None
    """Account of the job."""
    gpus_per_node: Annotated[int | None, Knob("cluster", unit="N", least=1)] = None
    """Number of GPUs on each host, usually the same as --workers-per-node."""
    cpus_per_task: Annotated[int | None, Knob("cluster", unit="N", least=1)] = None
    """Number of cores for each rank."""
    setup: Annotated[Sequence[str], Knob("cluster", unit="LINE")] = ()
    """Shell line to run before the ranks start, such as module load cuda. May be repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchJob(SlurmOptions):
    """A SLURM job: its options and its command. Raises UsageError, which names the option, for
    values that cannot work.
    """

    job_name: str
    """The job's name in the queue."""
    command: Sequence[str]
    """The program that every task runs, and its arguments."""
    log: str
    """The folder of slurm-JOBID.log. SLURM does not make it."""
    run: str | None = None
    """The beginning of the folder's name for --run. The job's id is added, which stays the same
    when the job returns to the queue.
    """

    def __post_init__(self) -> None:
        knob.check(self)
        for field in fields(self):
            value, option = getattr(self, field.name), "--" + field.name.replace("_", "-")
            for text in (
                [value] if isinstance(value, str) else value if isinstance(value, Sequence) else []
            ):
                if _UNPRINTABLE.search(text):
                    raise UsageError("control-character", option=option, value=text)
                if not text and isinstance(value, str):
                    raise UsageError("empty-value", option=option)
        limit(self.time)
        if "%" in self.log:
            raise UsageError("percent-in-log", log=self.log)


def limit(time: str) -> timedelta:
    """Parse a time limit as SLURM does: minutes, minutes:seconds, hours:minutes:seconds. After
    `days-` the first number is hours. Raises UsageError for other text.
    """
    span = timedelta()
    if found := _TIME.fullmatch(time):
        days, *parts = found.groups("0")
        units = ("hours", "minutes", "seconds") if found[1] or found[4] else ("minutes", "seconds")
        span = timedelta(days=int(days), **dict(zip(units, map(int, parts), strict=False)))
    if not span:
        expected = "minutes (90), hours:minutes:seconds (1:30:00) or days-hours (2-12)"
        raise UsageError("wrong-type", name="time", value=time, expected=expected)
    return span


def batch_script(job: BatchJob) -> str:
    """Return the text of the batch script."""
    return "\n".join([*_head(job), "", *_setup(job), *_body(job), ""])


def _head(job: BatchJob) -> list[str]:
    options = {
        "job-name": job.job_name,
        "nodes": job.nodes,
        "ntasks": job.nodes * job.workers_per_node,
        "ntasks-per-node": job.workers_per_node,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-node": job.gpus_per_node,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "output": f"{job.log}/slurm-%j.log",
        "open-mode": "append",
        "signal": f"USR1@{SIGNAL_SECONDS}",
    }
    given = {name: value for name, value in options.items() if value is not None}
    return [
        "#!/usr/bin/env bash",
        *(f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in given.items()),
        "#SBATCH --requeue",
    ]


def _setup(job: BatchJob) -> list[str]:
    if not job.setup:
        return []
    lines = []
    for line in job.setup:
        said = shlex.quote(f"lockstep: a line of --setup failed: {line}")
        lines += [
            line,
            f'[ "$?" -eq 0 ] || {{ printf "%s\\n" {said} >&2; exit {int(ExitCode.FAILED)}; }}',
        ]
    return [*lines, ""]


def _body(job: BatchJob) -> list[str]:
    numbers = [
        f"--nodes={job.nodes}",
        f"--ntasks={job.nodes * job.workers_per_node}",
        f"--ntasks-per-node={job.workers_per_node}",
    ]
    if job.cpus_per_task is not None:
        numbers.append(f"--cpus-per-task={job.cpus_per_task}")  # srun does not take it from the job
    command = [shlex.quote(word) for word in job.command]
    if job.run is not None:
        command += ["--run", f'{shlex.quote(f"{job.run}-")}"$SLURM_JOB_ID"']
    return [
        (
            "# One task per rank. When the first one ends, the others get a minute to end. srun"
            " returns the highest exit code."
        ),
        f"srun {' '.join(numbers)} --kill-on-bad-exit=0 --wait=60 \\",
        f"    {' '.join(command)}",
        "code=$?",
        (
            f'if [ "$code" -eq {int(ExitCode.PREEMPTED)} ]; then  # preempted, and saved: the'
            " same job resumes"
        ),
        (
            '    scontrol requeue "$SLURM_JOB_ID" || printf "%s\\n" "lockstep: not requeued; submit'
            ' the job again to resume" >&2'
        ),
        "fi",
        'exit "$code"',
    ]


def slurm(
    options: SlurmOptions,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TASK|SCRIPT",
            autocompletion=tasks,
            help="Task of `lockstep train`, or a script of `lockstep run` (a file without task()).",
        ),
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGS]",
            help="Options of `lockstep train`, or arguments of the script, after --.",
        ),
    ] = None,
    log: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for slurm-JOBID.log. Created if missing.")
    ] = Path("logs"),
    job_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the job. Default: the name of the task or script."
        ),
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit/--print", help="Submit the script with sbatch, or print it.")
    ] = False,
) -> None:
    """Write a SLURM batch script for TASK or SCRIPT, and print or submit it.

    The job starts one SLURM task per rank. Before its time limit, and when SLURM preempts it, the
    job saves a checkpoint, returns to the queue, and later resumes. Its run directory is
    runs/NAME-JOBID. The ranks use the same Python as this command.
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
    """Return the job's name, the command of each task, and the beginning of the run directory's
    name (None for a script, or if `args` give --run).
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
    """Return --run from the options of `lockstep train`. Mistakes in them are errors here, because
    a job may wait for days before it finds them.
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
            reason="a job must train; run `lockstep train --help` here",
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
        print(f"error: sbatch refused the job: {done.stderr.strip()}", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED)
    return done.stdout.strip().partition(";")[0]
