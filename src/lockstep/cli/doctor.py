"""`lockstep doctor`: check whether this host, or a set of nodes, is fit to train."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import nodes
from lockstep.cli.arguments import JsonFile, at_least_one
from lockstep.cli.choices import Cluster
from lockstep.errors import ExitCode

if TYPE_CHECKING:
    from lockstep.launcher.supervise import Outcome

COMMAND = nodes.Command
_WORKERS = 2


def doctor(
    cluster: Cluster,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N",
            help=f"Number of ranks over all nodes. Default: {_WORKERS} on one host, else 1 per node.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Check that this host, or a cluster, is fit for training.

    It checks versions, GPUs, cores, memory, limits, network interfaces, correct sums, and the speed
    of every link. It runs on one host, on a Ray cluster (--ray), on a set of nodes (--nodes), or
    under srun or torchrun. It ends with "fit to train" and exit code 0, or with what to fix and exit
    code 1. A warning does not change the exit code.
    """
    at_least_one(workers=workers)
    from lockstep.launcher.rank import Target, rank_here, work_as
    from lockstep.launcher.supervise import supervise
    from lockstep.tools.timing.output_files import check_writable, write_json

    check_writable(json_file, "--json")
    target = Target(
        module="lockstep.tools.doctor.examine",
        args=[] if json_file is None else [str(json_file.absolute())],
    )
    if cluster.ray is not None:
        nodes.refuse_beside_ray(cluster)
        _exit_as(
            nodes.run_on_ray(
                cluster.ray,
                target,
                workers or 1,
                workers or sys.maxsize,
                each=1 if workers is None else None,
                reports=False,
            )
        )
    placement = None if cluster.nodes is not None else rank_here(workers)
    if placement is not None:
        from lockstep.tools.doctor.examine import main

        work_as(placement, lambda: sys.exit(not main(json_file)))
        return
    node_set, workers = nodes.fixed_set(cluster, workers)
    if node_set is not None:
        with nodes.placed(node_set) as (share, network):
            _exit_as(
                supervise(target, environment=network, share=share, console="first", reports=False)
            )
    from lockstep.tools.doctor.examine import examine_host

    result = examine_host(_WORKERS if workers is None else workers)
    print(result.text())
    write_json(json_file, result.as_json())
    if not result.fit:
        raise typer.Exit(ExitCode.FAILED)


def _exit_as(outcome: Outcome) -> None:
    """Exit with the ranks' exit code. The first rank has printed the report."""
    from lockstep.launcher import failures

    if outcome.failure is not None and outcome.failure.kind != "exit":
        print(failures.render(outcome.failure), file=sys.stderr)
    raise typer.Exit(outcome.exit_code)
