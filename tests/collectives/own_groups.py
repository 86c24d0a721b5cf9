"""Groups that a test may break."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist

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
