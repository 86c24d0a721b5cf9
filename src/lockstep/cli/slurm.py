"""`lockstep slurm`: write a batch script for a task or a script, and print or submit it.

The script is a template. What differs between clusters (time limit, partition, GPUs) is an option
of sbatch, or a line that the user adds.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.completion import tasks
from lockstep.errors import ExitCode, UsageError

_TEMPLATE = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={ranks}
#SBATCH --ntasks-per-node={ranks_per_node}
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
# Add --time, --partition, --gpus-per-node and the like here, or give them to sbatch.
# Add shell lines that the ranks need below, such as: module load cuda

# One task per rank. When the first one ends, the others get a minute to end.
# srun returns the highest exit code. It does not take --cpus-per-task from the job by itself.
[ -z "${{SLURM_CPUS_PER_TASK-}}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
srun --nodes={nodes} --ntasks={ranks} --ntasks-per-node={ranks_per_node} --kill-on-bad-exit=0 --wait=60 \\
    {command}
code=$?
if [ "$code" -eq {preempted} ]; then  # preempted, and saved: the same job resumes
    scontrol requeue "$SLURM_JOB_ID" || echo "lockstep: not requeued; submit the job again to resume" >&2
fi
exit "$code"
"""


def batch_script(name: str, command: str, nodes: int, ranks_per_node: int) -> str:
    """Return the text of the batch script. `command` is shell code, with its words quoted."""
    return _TEMPLATE.format(
        name=re.sub(r"[^\w.-]", "_", name),
        nodes=nodes,
        ranks=nodes * ranks_per_node,
        ranks_per_node=ranks_per_node,
        command=command,
        preempted=int(ExitCode.PREEMPTED),
    )


def slurm(
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
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of hosts.")] = 1,
    workers_per_node: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Number of ranks on each host. Each rank is one SLURM task."
        ),
    ] = 1,
    submit: Annotated[
        bool, typer.Option("--submit/--print", help="Submit the script with sbatch, or print it.")
    ] = False,
) -> None:
    """Write a SLURM batch script for TASK or SCRIPT, and print or submit it.

    The job starts one SLURM task per rank. Before its time limit, and when SLURM preempts it, the
    job saves a checkpoint, returns to the queue, and later resumes. Its run directory is
    runs/NAME-JOBID. The ranks use the same Python as this command. Options of sbatch override the
    script's lines: `lockstep slurm TASK | sbatch --time 4:00:00`.
    """
    name, command = _command(target, args or [])
    text = batch_script(name, command, nodes, workers_per_node)
    if not submit:
        print(text, end="")
        return
    try:
        sbatch = subprocess.run(["sbatch"], input=text, text=True, check=False)
    except FileNotFoundError:
        raise UsageError("no-sbatch") from None
    raise typer.Exit(sbatch.returncode)


def _command(target: str, args: list[str]) -> tuple[str, str]:
    """Return the job's name, and the shell command of each task. Its run directory has the job's
    number, which stays the same when the job returns to the queue.
    """
    from lockstep.training.resolve import BUNDLED, declares_task, located, short_name

    lockstep = [sys.executable, "-P", "-m", "lockstep"]
    path = Path(target).expanduser()
    if target not in BUNDLED and path.is_file() and not declares_task(path):
        return path.stem, shlex.join([*lockstep, "run", str(path.absolute()), *args])
    task = located(target)
    name = short_name(task)
    command = shlex.join([*lockstep, "train", task, *args])
    if _chooses_run(args):
        return name, command
    run = shlex.quote(str(Path("runs", f"{name}-").absolute()))
    return name, f'{command} --run {run}"$SLURM_JOB_ID"'


def _chooses_run(args: list[str]) -> bool:
    """Whether options of `lockstep train` give --run. Mistakes in them are errors here, because a
    job may wait for days before it finds them.
    """
    from lockstep.cli.options import spread
    from lockstep.cli.refusals import REFUSED, of_parser
    from lockstep.cli.train import train

    app = typer.Typer(add_completion=False)
    app.command()(spread(train))
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
    return context.params["run"] is not None
