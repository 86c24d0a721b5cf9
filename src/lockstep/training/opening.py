"""What is opened around a training: the world, the run directory, and how the process computes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import get_args

import torch.distributed as dist

from lockstep.errors import PeerFailed, UsageError
from lockstep.settings import Device, Settings
from lockstep.training.run_directory import RunDirectory, take_over
from lockstep.training.threads import intra_op_threads
from lockstep.world import World, init

_BACKEND: dict[Device, str | None] = {"auto": None, "cpu": "gloo", "cuda": "nccl"}


def computing(settings: Settings, world: World) -> AbstractContextManager[object]:
    """How the process computes while it trains: in exact mode that is the world's affair, until it closes."""
    if settings.exact:
        return nullcontext(world.compute_deterministically(settings.threads))
    return intra_op_threads(settings.threads)


@contextmanager
def world_for(world: World | None, device: Device) -> Iterator[World]:
    """The one that is given, else the open one, else one for this training."""
    if device not in get_args(Device):
        raise UsageError(f"device={device!r} is unknown: choose one of {', '.join(get_args(Device))}")
    if world is None and not dist.is_initialized():
        with init(backend=_BACKEND[device]) as own:
            yield own
        return
    world = world or World.current()
    if device not in ("auto", world.device.type):
        raise UsageError(
            f"device={device!r}, but the open world's is {world.device.type!r}: leave device out, or open it with another backend"
        )
    yield world


@contextmanager
def run_directory_for(run: Path | str | RunDirectory | None, settings: Settings, world: World) -> Iterator[RunDirectory | None]:
    """The run's folder on all ranks. A path is claimed by rank 0, whose failure all ranks must hear of."""
    if run is None or isinstance(run, RunDirectory):
        yield run
        return
    claimed, failure = None, None
    if world.rank == 0:
        try:
            claimed = RunDirectory.claim(run, settings.task)
            take_over(claimed, settings)
        except (UsageError, OSError) as error:
            failure = error
    if world.agree(failure is not None):
        raise failure or PeerFailed(f"rank 0 could not use the run directory {run}")
    with claimed or RunDirectory.of_launcher(Path(run)) as directory:
        yield directory
