"""`lockstep run`: run any script or module on N ranks, on one host or several."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import nodes
from lockstep.cli.choices import Cluster
from lockstep.config.launching import Launch
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.launcher.fixed import Nodes
    from lockstep.launcher.rank import Target
    from lockstep.launcher.supervise import Outcome, Workers
    from lockstep.runtime.environment import Placement

# All words after the script's name belong to the script, also those that look like options of
# `lockstep run`.
CONTEXT = {"allow_interspersed_args": False}
COMMAND = nodes.Command


def run(
    launch: Launch,
    cluster: Cluster,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]", help="A Python file and its arguments."),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N|N:M",
            help="Number of ranks over all hosts. N:M starts up to M, and continues while N or more"
            " are left. Default: the number of GPUs, else 1.",
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
    check_replicas: Annotated[
        bool,
        typer.Option(
            "--check-replicas",
            help="For scripts that train without Lockstep: compare the ranks' weights after an"
            " optimizer's first two steps, after every 100th and after the last.",
        ),
    ] = False,
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
      lockstep run -n 1:4 train.py                   restart it when a worker is killed
      lockstep run -n 2 --check-replicas train.py    say when the ranks' weights differ
    """
    if not command:
        raise UsageError("nothing-to-run")
    _check(launch, log)
    from lockstep.launcher.rank import rank_here
    from lockstep.launcher.supervise import Workers

    allowed = None if workers is None else Workers.read(workers)
    target = _target(command[0], command[1:], module=module)
    target = replace(target, check_replicas=check_replicas)
    script = _Script(target=target, logs=_folder(log), launch=launch)
    if cluster.ray is not None:
        nodes.refuse_beside_ray(cluster)
        raise typer.Exit(script.on_ray(cluster.ray, nodes.ranks_on_ray(allowed)))
    placement = None if cluster.nodes is not None else rank_here(workers)
    if placement is not None:
        script.as_rank(placement)
        return
    node_set, workers = nodes.fixed_set(cluster, workers)
    if node_set is not None:
        nodes.refuse_restarts(launch)
        raise typer.Exit(script.on_nodes(node_set))
    raise typer.Exit(script.here(None if workers is None else Workers.read(str(workers))))


def _check(launch: Launch, log: Path | None) -> None:
    """Raise UsageError for options that do not apply to a script."""
    if launch.debug and log is None:
        raise UsageError(
            "option-missing",
            option="--debug",
            needed="--log DIR",
            reason="without --log DIR, logs are removed when the run succeeds",
        )
    if launch.on_corruption == "exclude":
        raise UsageError("nothing-to-exclude", where="a script")


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

    def on_ray(self, address: str, workers: Workers) -> int:
        """Run it on the nodes of a Ray cluster, and return the exit code."""
        from lockstep.launcher.supervise import restarts_of

        return nodes.run_on_ray(
            address,
            self.target,
            workers.least,
            workers.most,
            console="joined",
            logs=self.logs,
            launch=self.launch,
            restarts=restarts_of(self.launch, workers),
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

    def here(self, workers: Workers | None) -> int:
        """Run it on this host alone, and return the exit code."""
        from lockstep.launcher.start import gpus
        from lockstep.launcher.supervise import (
            BEGINS_AGAIN,
            Workers,
            restarts_of,
            run_with_restarts,
            supervise,
        )

        if workers is not None and workers.most > 1 and sys.stderr.isatty():
            # the imports that follow take seconds
            print(f"starting {workers.most} ranks ...", file=sys.stderr, flush=True)

        def start(count: int | None, *, grows: bool = False) -> Outcome:
            return supervise(
                self.target,
                count,
                logs=self.logs,
                console="joined",
                launch=self.launch,
                grows=grows,
            )

        if workers is None and not restarts_of(self.launch, workers):
            return start(None).exit_code
        if workers is None:
            count = gpus() or 1
            workers = Workers(count, count)
        most = workers.most
        return run_with_restarts(
            lambda count: start(count, grows=count < most),
            workers,
            self.launch,
            hint=BEGINS_AGAIN,
        ).exit_code

    def on_nodes(self, node_set: Nodes) -> int:
        """Run it on this node of a fixed set, and return the exit code."""
        from lockstep.launcher.supervise import supervise

        with nodes.placed(node_set, self.launch.timeout) as (share, network):
            return supervise(
                self.target,
                None if share is None else share.ranks.count,
                logs=self.logs,
                console="joined",
                environment=network,
                launch=self.launch,
                share=share,
            ).exit_code
