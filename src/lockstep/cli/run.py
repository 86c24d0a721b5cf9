"""`lockstep run`: run any script or module on N ranks, on one host or several."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import nodes
from lockstep.cli.arguments import at_least_one
from lockstep.cli.choices import Cluster
from lockstep.cli.options import KnobHelp
from lockstep.config.launching import Launch
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.launcher.fixed import Nodes
    from lockstep.launcher.rank import Target
    from lockstep.runtime.environment import Placement

# All words after the script's name belong to the script, also those that look like options of
# `lockstep run`.
CONTEXT = {"allow_interspersed_args": False}
COMMAND = nodes.Command


def run(
    launch: Annotated[
        Launch,
        KnobHelp(
            "on_stall",
            unit="wait|abort",
            help="On a stall: warn and wait, or abort. Default: abort.",
        ),
        KnobHelp(
            "max_restarts",
            help="Maximum number of restarts after a worker or node is lost (with --ray). Default: 0.",
        ),
    ],
    cluster: Cluster,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]", help="A Python file and its arguments."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N",
            help="Number of ranks over all hosts. Default: the number of GPUs, else 1.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, as python -m does.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write rank-N.log there. Default: a temporary folder, kept if a rank fails.",
        ),
    ] = None,
) -> None:
    """Run SCRIPT (or -m MODULE) on several ranks of this host, a Ray cluster, or a set of nodes.

    Each rank runs it as plain Python would. lockstep.init(), or torch's init_process_group(), finds
    the other ranks. A line that several ranks print is shown once, as [0-3] text. When a rank
    fails, Lockstep stops the others, prints its traceback last, and exits with its exit code. If
    srun or mpirun starts this command, each process is one rank.

    \b
    Examples:
      lockstep run --workers 4 train.py --lr 0.1     run train.py --lr 0.1 on 4 ranks
      lockstep run -n 2 -m package.train             run a module, as python -m does
      lockstep run -n 2 --log logs train.py          keep each rank's output in logs/
    """
    if not command:
        raise UsageError("nothing-to-run")
    at_least_one(workers=workers)
    _check(launch, log, on_ray=cluster.ray is not None)
    from lockstep.launcher.rank import rank_here

    target = _target(command[0], command[1:], module=module)
    script = _Script(target=target, logs=_folder(log), launch=launch)
    if cluster.ray is not None:
        nodes.refuse_beside_ray(cluster)
        raise typer.Exit(script.on_ray(cluster.ray, nodes.ranks_on_ray(workers)))
    placement = None if cluster.nodes is not None else rank_here(workers)
    if placement is not None:
        script.as_rank(placement)
        return
    node_set, workers = nodes.fixed_set(cluster, workers)
    raise typer.Exit(script.on_nodes(node_set, workers))


def _check(launch: Launch, log: Path | None, *, on_ray: bool) -> None:
    """Raise UsageError for options that do not apply to a script."""
    if launch.debug and log is None:
        raise UsageError(
            "option-missing",
            option="--debug",
            needed="--log DIR",
            reason="without --log DIR, logs are removed when the run succeeds",
        )
    if launch.on_stall == "restart":
        raise UsageError("restart-needs-checkpoints")
    if launch.on_corruption == "exclude":
        raise UsageError("nothing-to-exclude", where="a script")
    if launch.max_restarts is not None and not on_ray:
        raise UsageError(
            "no-restarts-here",
            restarts=launch.max_restarts,
            what="a script is restarted on a Ray cluster only",
        )


def _folder(folder: Path | None) -> Path | None:
    """Create the directory that --log names. Raises UsageError if that fails."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            "cannot-make-folder", option="--log", folder=str(folder), reason=error.strerror
        ) from error
    return folder.absolute()


def _target(name: str, args: list[str], *, module: bool) -> Target:
    from lockstep.launcher.rank import Target

    if not module:
        return Target(script=name, args=args)
    if PathFinder.find_spec(name.partition(".")[0], [os.getcwd(), *sys.path]) is None:
        raise UsageError("module-not-found", module=name, folder=os.getcwd())
    return Target(module=name, args=args)


@dataclass(frozen=True, kw_only=True)
class _Script:
    """The target of the ranks with its options, and the ways to start them."""

    target: Target
    logs: Path | None
    launch: Launch

    def on_ray(self, address: str, workers: int) -> int:
        """Run it on the nodes of a Ray cluster, and return the exit code."""
        return nodes.run_on_ray(
            address,
            self.target,
            workers,
            console="joined",
            logs=self.logs,
            launch=self.launch,
            restarts=self.launch.max_restarts or 0,
        ).exit_code

    def as_rank(self, placement: Placement) -> None:
        """Run it in this process, which srun or mpirun has started as a rank."""
        from lockstep.launcher.logs import redirect
        from lockstep.launcher.rank import refuse_watching, work_as
        from lockstep.runtime.environment import exported, timeout_for_ranks

        refuse_watching(placement, self.launch)
        os.environ.update(exported(placement, os.environ))
        os.environ.update(timeout_for_ranks(self.launch.timeout))

        def program() -> None:
            redirect(placement.rank, "all", self.logs)
            self.target.run()

        work_as(placement, program)

    def on_nodes(self, node_set: Nodes | None, workers: int | None) -> int:
        """Run it on this host, alone or as one of a fixed set, and return the exit code."""
        from lockstep.launcher.supervise import supervise

        if workers is not None and workers > 1 and sys.stderr.isatty():
            # the imports that follow take seconds
            print(f"starting {workers} ranks ...", file=sys.stderr, flush=True)
        with nodes.placed(node_set, self.launch.timeout) as (share, network):
            return supervise(
                self.target,
                workers if share is None else share.ranks.count,
                logs=self.logs,
                console="joined",
                environment=network,
                launch=self.launch,
                share=share,
            ).exit_code
