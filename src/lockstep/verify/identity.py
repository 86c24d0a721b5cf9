"""Another rank, for a moment: what a task's functions are told when they ask who they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lockstep.world import World


@contextmanager
def pretending(world: World, rank: int, size: int) -> Iterator[None]:
    """In the block the environment, torch.distributed and `world` say that this is rank `rank` of `size`. No collective may run in it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    ours = world.rank, world.size, world.local_rank, world.local_size
    group: Any = dist.ProcessGroup
    real = {name: vars(group)[name] for name in ("rank", "size")}
    try:
        os.environ.update(dict(zip(names, map(str, (rank, rank, size, size)), strict=True)))
        world.rank, world.size, world.local_rank, world.local_size = rank, size, rank, size
        group.rank, group.size = lambda self: rank, lambda self: size
        yield
    finally:
        for name, function in real.items():
            setattr(group, name, function)
        world.rank, world.size, world.local_rank, world.local_size = ours
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
