"""`lockstep run`: any script or module, on N ranks of this host or of several."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli import hosts
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
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as for python -m.")] = False,
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
    """Run SCRIPT (or -m MODULE) on several ranks of this host, or with --nodes of several.

    Each rank runs it as plain Python would; lockstep.init() or torch's init_process_group() finds the other ranks.
    When a rank fails the others are stopped, and its traceback is the last thing printed. The exit code is that rank's own.
    """
    if not command:
        raise UsageError("nothing to run: give a script (lockstep run train.py) or a module (lockstep run -m package.train)")
    from lockstep.launcher.hosts.plan import Plan
    from lockstep.launcher.supervise import Target, supervise

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
        raise typer.Exit(hosts.run_script(plan, command, module=module))
    if max_restarts is not None:
        raise UsageError(
            f"--max-restarts {max_restarts} without --nodes: a script on this host alone is not begun anew; use lockstep train"
        )
    name, args = command[0], command[1:]
    target = Target(module=name, args=args) if module else Target(script=name, args=args)
    raise typer.Exit(supervise(target, workers).exit_code)
