"""`lockstep run`: any script or module, on N ranks of this host or of several."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import hosts
from lockstep.cli.given import at_least_one
from lockstep.errors import UsageError

# Everything from the script's name on belongs to the script, also what looks like an option of ours.
CONTEXT = {"allow_interspersed_args": False}


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]", show_default=False, help="A Python file and its arguments.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", show_default=False, help="Ranks over all hosts; default: the GPUs, else 1.")
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
    log: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Write rank-N.log there; default: a temporary place, kept if a rank fails."),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Have NCCL and torch write to the logs what they do, and add a line for every collective.")
    ] = False,
    nodes: hosts.Nodes = None,
    meet: hosts.Meet = None,
    node_rank: hosts.NodeRank = None,
    token: hosts.TokenFile = None,
    workers_per_node: hosts.WorkersPerNode = None,
    join_timeout: hosts.JoinTimeout = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, show_default=False, help="With --nodes: how often all begin anew after a kill; default: 3 with N:M, else 0."),
    ] = None,
) -> None:
    """Run SCRIPT (or -m MODULE) on several ranks of this host, with --nodes of several, or as one rank where srun or mpirun has started several.

    Each rank runs it as plain Python would; lockstep.init() or torch's init_process_group() finds the other ranks.
    Lines that several ranks print are shown once, as [0-3] text. When a rank fails the others are stopped, and its traceback is the
    last thing printed. The exit code is that rank's own.
    """
    if not command:
        raise UsageError("nothing to run: give a script (lockstep run train.py) or a module (lockstep run -m package.train)")
    at_least_one(workers=workers)
    if debug and log is None:
        raise UsageError("--debug writes to the logs, which are removed when all goes well: say where they shall stay, with --log DIR")
    from lockstep.launcher import worker
    from lockstep.launcher.foreign import rank_here, refuse_watching, work_as
    from lockstep.launcher.hosts.plan import Plan
    from lockstep.launcher.job_step import exported
    from lockstep.launcher.log_place import directory_for_logs
    from lockstep.launcher.supervise import Target, supervise
    from lockstep.launcher.watch import Stalls, timeout_for_ranks

    if on_stall == "restart":
        raise UsageError("on_stall='restart' needs checkpoints to go on from: it is for lockstep train; choose wait or abort")
    stalls = Stalls(then=on_stall, after=stall_after)  # type: ignore[arg-type]  # text: refused there if unknown
    environment = timeout_for_ranks(timeout)
    plan = Plan.read(
        nodes,
        meet=meet,
        node_rank=node_rank,
        token=token,
        workers=workers,
        workers_per_node=workers_per_node,
        join_timeout=join_timeout,
        restarts=max_restarts,
    )
    if plan is not None:
        raise typer.Exit(
            hosts.run_script(
                plan, command, module=module, logs=directory_for_logs(log), environment=environment, debug=debug, stalls=stalls
            )
        )
    if max_restarts is not None:
        raise UsageError(
            f"--max-restarts {max_restarts} without --nodes: a script on this host alone is not begun anew; use lockstep train"
        )
    name, args = command[0], command[1:]
    if module and PathFinder.find_spec(name.partition(".")[0], [os.getcwd(), *sys.path]) is None:
        raise UsageError(f"-m {name}: there is no module {name.partition('.')[0]!r} in {os.getcwd()}, and none is installed")
    target = Target(module=name, args=args) if module else Target(script=name, args=args)
    here = rank_here(workers)
    if here is not None:
        refuse_watching(here, debug or stalls != Stalls())
        logs = directory_for_logs(log)
        os.environ.update({**exported(here, os.environ), **environment})
        work_as(here, lambda: worker.main([*(["--logs", str(logs)] if logs is not None else []), *target.arguments()]))
        return
    if workers is not None and workers > 1 and sys.stderr.isatty():  # what is imported now takes seconds
        print(f"starting {workers} ranks ...", file=sys.stderr, flush=True)
    outcome = supervise(
        target, workers, logs=directory_for_logs(log), console="joined", environment=environment, debug=debug, stalls=stalls
    )
    raise typer.Exit(outcome.exit_code)
