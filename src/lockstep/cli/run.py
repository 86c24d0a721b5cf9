"""`lockstep run`: any script or module, on N ranks of this host."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from lockstep.errors import UsageError

# Everything from the script's name on belongs to the script, also what looks like an option of ours.
CONTEXT = {"allow_interspersed_args": False}


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]", show_default=False, help="A Python file and its arguments.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", show_default=False, help="Ranks to start; default: the GPUs, else 1.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", show_default=False, help="The longest that one collective may take; default: 30 minutes."),
    ] = None,
    on_stall: Annotated[
        str, typer.Option(metavar="wait|abort", help="When no rank gets on: say who is waited for; abort: and end the run.")
    ] = "abort",
    stall_after: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long nothing must change for that; longer where the run needs it.")
    ] = 30,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as for python -m.")] = False,
) -> None:
    """Run SCRIPT (or -m MODULE) on several ranks of this host, or as one rank where srun or mpirun has started several of these.

    Each rank runs it as plain Python would; lockstep.init() or torch's init_process_group() finds the other ranks.
    When a rank fails the others are stopped, and its traceback is the last thing printed. The exit code is that rank's own.
    """
    if not command:
        raise UsageError("nothing to run: give a script (lockstep run train.py) or a module (lockstep run -m package.train)")
    from lockstep.launcher import worker
    from lockstep.launcher.foreign import rank_here, refuse_watching, work_as
    from lockstep.launcher.job_step import exported
    from lockstep.launcher.supervise import Target, supervise
    from lockstep.launcher.watch import Stalls, timeout_for_ranks

    name, args = command[0], command[1:]
    target = Target(module=name, args=args) if module else Target(script=name, args=args)
    here = rank_here(workers)
    if here is not None:
        refuse_watching(here, on_stall != "abort" or stall_after != 30)
        os.environ.update({**exported(here, os.environ), **timeout_for_ranks(timeout)})
        work_as(here, lambda: worker.main(target.arguments()))
        return
    if on_stall == "restart":
        raise UsageError("on_stall='restart' needs checkpoints to go on from: it is for lockstep train; choose wait or abort")
    stalls = Stalls(then=on_stall, after=stall_after)  # type: ignore[arg-type]  # text: refused there if unknown
    raise typer.Exit(supervise(target, workers, stalls=stalls, environment=timeout_for_ranks(timeout)).exit_code)
