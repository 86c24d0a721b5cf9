"""What a test on a team takes back, because the team's world stays open: groups that it breaks,
threads that it starts, and exact mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from lockstep.collectives.background import Background
from lockstep.collectives.group import Group
from lockstep.world.world import World

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def group_of_its_own(world: World, *parts: Sequence[int]) -> Iterator[Group]:
    """A group for one test: of all ranks, or of this rank's part of them. A mismatch or a timeout
    in it does not touch the world's group.

    torch numbers these groups. Those of `World.subgroup` are named after their ranks: a second one
    would find the addresses of the first in the store.
    """
    for part in parts or [range(world.size)]:
        process_group = dist.new_group(list(part), sort_ranks=False)
        if world.rank in part:
            own = process_group
    group = world.group_of(own)
    try:
        yield group
    finally:
        group.forget()
        dist.destroy_process_group(own)


def tidied(fn: Callable[Concatenate[World, P], R]) -> Callable[Concatenate[World, P], R]:
    """Afterwards end the background thread of the world's group, and exact mode."""

    @wraps(fn)
    def run(world: World, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(world, *args, **kwargs)
        finally:
            world.group._background.close()
            world.group._background = Background("lockstep collectives")
            if world._determinism is not None:
                world._owned.remove(world._determinism)
                world._determinism.close()
                world._determinism = None

    return run
