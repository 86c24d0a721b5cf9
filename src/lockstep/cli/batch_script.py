"""The batch script that `lockstep slurm` writes: a pure function from what was asked for to its
text.

Nothing in it is a template filled with the user's words: every word is quoted for the shell that
reads it. Lines of --setup are the exception, being shell themselves.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Annotated

from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.errors import ExitCode, UsageError

SIGNAL_SECONDS = 120  # before the time limit; SLURM may be up to 60 s early
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What a user asks SLURM for."""

    nodes: Annotated[int, Knob("cluster", unit="N", least=1)] = 1
    """Hosts."""
    workers_per_node: Annotated[int, Knob("cluster", unit="N", least=1)] = 1
    """Ranks on each of them: one task a rank."""
    time: Annotated[str, Knob("cluster", unit="LIMIT")] = "1:00:00"
    """Minutes (90), hours:minutes:seconds (1:30:00) or days-hours (2-12); 1:00 is one minute."""
    partition: Annotated[str | None, Knob("cluster", default="the cluster's")] = None
    """Partition of the job."""
    account: Annotated[str | None, Knob("cluster", default="yours")] = None
    """Account of the job."""
    gpus_per_node: Annotated[int | None, Knob("cluster", unit="N", least=1)] = None
    """GPUs on each host, usually as many as --workers-per-node."""
    cpus_per_task: Annotated[int | None, Knob("cluster", unit="N", least=1)] = None
    """Cores of each rank."""
    setup: Annotated[Sequence[str], Knob("cluster", unit="LINE")] = ()
    """Line of shell before the ranks start, such as module load cuda; may be repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchJob(SlurmOptions):
    """What SLURM is asked for, and what runs there. Raises UsageError, naming the option, for
    what cannot work.
    """

    job_name: str
    """How the queue shows it."""
    command: Sequence[str]
    """What every task runs: a program and its arguments."""
    log: str
    """The folder of slurm-JOBID.log. SLURM does not make it."""
    run: str | None = None
    """A folder to whose name the job's id is added, given to the command as --run: the same
    after the job was put back into the queue.
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
    """How long SLURM takes `time` to be: minutes, minutes:seconds, hours:minutes:seconds; behind
    days- hours come first. Else a UsageError.
    """
    span = timedelta()
    if found := _TIME.fullmatch(time):
        days, *parts = found.groups("0")
        units = ("hours", "minutes", "seconds") if found[1] or found[4] else ("minutes", "seconds")
        span = timedelta(days=int(days), **dict(zip(units, map(int, parts), strict=False)))
    if not span:
        raise UsageError("not-a-time-limit", value=time)
    return span


def batch_script(job: BatchJob) -> str:
    """The script's text."""
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
            "# One task a rank. The first that ends leaves the others a minute to end as well; the"
            " exit code is the highest of theirs."
        ),
        f"srun {' '.join(numbers)} --kill-on-bad-exit=0 --wait=60 \\",
        f"    {' '.join(command)}",
        "code=$?",
        (
            f'if [ "$code" -eq {int(ExitCode.PREEMPTED)} ]; then  # asked to stop, and saved: the'
            " same job goes on from there"
        ),
        (
            '    scontrol requeue "$SLURM_JOB_ID" || printf "%s\\n" "lockstep: not requeued; submit'
            ' the job again to go on" >&2'
        ),
        "fi",
        'exit "$code"',
    ]
