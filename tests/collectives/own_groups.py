"""Groups that a test may break, and worlds over several hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import lockstep
from lockstep.collectives.group import Group
from lockstep.world.world import World


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


@contextmanager
def on_hosts(world: World, counts: Sequence[int], **options: Any) -> Iterator[World]:
    """The same ranks again, said to be on several hosts with `counts` ranks each."""
    rank, size = world.rank, world.size
    world.close()
    hosts = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    host, local = hosts[rank]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(counts[host]),
        GROUP_RANK=str(host),
    )
    options.setdefault("timeout", timedelta(seconds=30))
    with lockstep.init(backend="gloo", **options) as apart:
        yield apart
