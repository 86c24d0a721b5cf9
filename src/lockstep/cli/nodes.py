"""What several commands share to run on many machines: a Ray cluster, or a fixed set of nodes."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.cli import options
from lockstep.config.launching import Launch
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.cli.choices import Cluster
    from lockstep.config.settings import Settings
    from lockstep.integrations.ray_cluster.job import Job
    from lockstep.launcher.fixed import Nodes
    from lockstep.launcher.rank import Target
    from lockstep.launcher.supervise import Outcome, Share, Workers
    from lockstep.training.run_directory import RunDirectory

T = TypeVar("T")
RAY = "--ray"
_ADDRESS = re.compile(r"auto|(ray://)?[^\s:/]+:\d+|(ray://)?\[[\da-fA-F:]+\]:\d+")


class Command(options.GroupedCommand):
    """A command whose `--ray` needs no address: `lockstep train my_task.py --ray`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._with_address(args, mixed=ctx.allow_interspersed_args))

    def _with_address(self, args: list[str], *, mixed: bool) -> list[str]:
        """Add the address `auto` to a --ray without one. With `mixed`, options may follow
        arguments.
        """
        with_value: set[str] = set()
        for param in self.params:
            if not getattr(param, "is_flag", False):
                with_value.update(name for name in param.opts if name.startswith("-"))
        words = iter(enumerate(args))
        for index, word in words:
            if word == "--" or not (mixed or word.startswith("-")):
                break  # the rest belongs to the script
            if word == RAY and RAY in with_value:
                address = args[index + 1 : index + 2]
                if not address or not _ADDRESS.fullmatch(address[0]):
                    return [*args[:index], f"{RAY}=auto", *args[index + 1 :]]
                break
            if word in with_value:
                next(words, None)
        return args


# -- a Ray cluster -------------------------------------------------------------------------------


def run_on_ray(
    address: str, target: Target, least: int, most: int, *, reports: bool = True, **more: Any
) -> Outcome:
    """Run `target` on a Ray cluster, on as many of `least` to `most` ranks as fit. `more` are fields
    of Job.
    """
    from lockstep.integrations.ray_cluster.driver import run_on_cluster

    job = _job(address, target, least=least, most=most, **more)
    return run_on_cluster(job, reports=reports)


def calling_on_ray(address: str, task: str, gpus: bool | None) -> Callable[..., list[Any]]:
    """Return a replacement for `start_ranks` that calls a function on ranks of a Ray cluster. All
    nodes must see the task's file.

    The ranks get the environment variables of this moment. So call this before importing a module
    that sets variables, such as torch.
    """
    from lockstep.launcher.rank import Target

    job = _job(address, Target(module="lockstep.training.worker", task=task), gpus=gpus)

    def start(
        fn: Callable[..., Any],
        workers: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        timeout: None,
        imports: Sequence[str] = (),
        variables: Callable[[int], Mapping[str, str]] | None = None,
    ) -> list[Any]:
        from lockstep.integrations.ray_cluster.driver import call_on_cluster
        from lockstep.integrations.ray_cluster.job import PickledCall

        own = None if variables is None else [variables(rank) for rank in range(workers)]
        call = PickledCall(pickled=pickle.dumps((fn, args)), imports=imports, variables=own)
        return call_on_cluster(replace(job, call=call, least=workers, most=workers))

    return start


def gpus_for(device: str) -> bool | None:
    """Whether each rank takes a GPU; None means that it does if the cluster has GPUs."""
    return {"cpu": False, "cuda": True}.get(device)


def train_on_ray(
    address: str,
    directory: RunDirectory,
    settings: Settings,
    workers: Workers,
    *,
    launch: Launch,
) -> Outcome:
    """Train on a Ray cluster. All its nodes must see the run directory."""
    from lockstep.integrations.ray_cluster.driver import run_on_cluster
    from lockstep.launcher.rank import Target
    from lockstep.launcher.supervise import restarts_of

    path = directory.path.absolute()
    job = _job(
        address,
        Target(module="lockstep.training.worker", args=[str(path)], task=settings.task),
        least=workers.least,
        most=workers.most,
        gpus=gpus_for(settings.device),
        restarts=restarts_of(launch, workers),
        logs=path,
        mark=directory.leave_mark(),
        wanted=directory.wanted.absolute(),
        grow=directory.grow.absolute(),
        launch=launch,
        heeds=True,
    )

    def prepare(size: int) -> None:
        directory.check()
        replace(settings, workers=size, grow_if_wanted=workers.elastic).write(path)

    return run_on_cluster(job, prepare)


_OF_A_HOST = re.compile(
    r"RAY_|LD_|LOCKSTEP_WARM_|SLURM_|PET_|CUDA_VISIBLE|NVIDIA_|(PATH|HOME|TMPDIR|PWD|VIRTUAL_ENV|HOSTNAME)$"
)


def _job(address: str, target: Target, **more: Any) -> Job:
    """Return a job with one rank that runs `target` in the current folder; `more` replaces fields.
    Ranks get the variables of this process, except those about its host.
    """
    from lockstep.integrations.ray_cluster.job import Job

    code = target.script or target.task
    environment = {name: value for name, value in os.environ.items() if not _OF_A_HOST.match(name)}
    fields: dict[str, Any] = {
        "least": 1,
        "most": 1,
        "console": "first",
        "environment": environment,
        "folder": "" if target.ours and target.task is None else os.getcwd(),
        "code": Path(code).resolve() if code is not None and code.endswith(".py") else None,
    }
    return Job(cluster=address, target=target, **fields | more)


# -- a fixed set of nodes ------------------------------------------------------------------------


def refuse_restarts(launch: Launch) -> None:
    """Raise UsageError for options that restart a run: no node knows which others are left."""
    if launch.max_restarts is not None:
        raise UsageError("no-restarts-here", option=f"--max-restarts {launch.max_restarts}")
    if launch.on_stall == "restart":
        raise UsageError("no-restarts-here", option="--on-stall restart")


def fixed_set(cluster: Cluster, workers: Any) -> tuple[Nodes | None, Any]:
    """Return the set of nodes from options or variables, and --workers. The set is None for one
    node, which is this host alone.
    """
    from lockstep.launcher.fixed import Nodes

    nodes = Nodes.read(cluster.nodes, cluster.node_rank, cluster.rdzv_endpoint, workers, os.environ)
    if nodes is None or nodes.count > 1:
        return nodes, workers
    return None, nodes.workers if workers is None else workers


@contextmanager
def placed(
    nodes: Nodes | None, timeout: float | None = None
) -> Iterator[tuple[Share | None, Mapping[str, str]]]:
    """Yield this node's share of the ranks (None without other nodes) and variables for its ranks.
    Node 0 runs the store of all ranks until the block ends.

    `timeout` is how many seconds node 0's name may take to become known; default: 300.
    """
    if nodes is None:
        yield None, {}
        return
    from lockstep.launcher.engine import LocalRanks, store
    from lockstep.launcher.start import fork_server
    from lockstep.launcher.supervise import Share
    from lockstep.runtime.interfaces import gloo_and_nccl

    count = ranks_here(nodes)
    ranks = LocalRanks(
        count=count,
        first_rank=nodes.rank * count,
        size=nodes.count * count,
        node=nodes.rank,
        nodes=nodes.count,
        address=nodes.host,
        port=nodes.port,
    )
    address = nodes.address_here(timeout)
    variables = gloo_and_nccl(address, os.environ)
    if nodes.rank > 0:
        yield Share(ranks=ranks), variables
        return
    with store(fork_server(), address, nodes.port) as (address, port):
        yield Share(ranks=replace(ranks, address=address, port=port)), variables


def ranks_here(nodes: Nodes) -> int:
    from lockstep.launcher.start import gpus

    return nodes.workers or gpus() or 1


def refuse_beside_ray(cluster: Cluster) -> None:
    """Raise UsageError if --ray is combined with options of a fixed set of nodes."""
    for name in ("nodes", "node_rank", "rdzv_endpoint"):
        value = getattr(cluster, name)
        if value is not None:
            raise UsageError(
                "options-exclude-each-other",
                one="--ray",
                other=f"{options.option_name(name)} {value}",
                reason="Ray says which nodes there are",
            )


def ranks_on_ray(workers: T | None) -> T:
    """Raise UsageError without --workers, because other users may share the cluster."""
    if workers is None:
        raise UsageError(
            "option-missing",
            option="--ray",
            needed="--workers N",
            reason="a cluster may be shared, so say how many ranks to start on it",
        )
    return workers


def as_rank(settings: Settings, run: Path | None, *, resume: bool, fresh: bool) -> Target:
    """Return what a rank of a fixed set of nodes runs. After the rendezvous rank 0 claims the run
    directory and tells the other ranks.
    """
    from lockstep.launcher.rank import Target

    job = {
        "settings": settings.as_json(),
        "run": None if run is None else str(run),
        "resume": resume,
        "fresh": fresh,
    }
    return Target(module="lockstep.training.as_rank", args=[json.dumps(job)], task=settings.task)
