"""Memory without a name: seen by all ranks of a host, refused to those of another."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

import lockstep
from lockstep.collectives.shared_memory import segment
from lockstep.errors import LockstepError
from tests.refused import refused
from tests.teams import on_team

SECOND = timedelta(seconds=1)


def written(world: lockstep.World) -> bytes:
    (memory,) = segment.share(world._store, "test", world.rank, world.size, 100, world.timeout)
    assert memory[world.rank] == 0
    memory[world.rank] = world.rank + 1
    world.barrier()
    return bytes(memory[:4])


def test_all_see_what_each_writes() -> None:
    assert on_team(written, 3) == [b"\x01\x02\x03\x00"] * 3


def test_a_rank_of_another_host_is_told() -> None:
    store = dist.HashStore()
    store.set("key/path", "another-boot pid:[1] /proc/1/fd/3")
    with refused("host-of-another-rank", rank=2):
        segment.share(store, "key", 2, 3, 100, SECOND)


def test_the_others_are_not_waited_for_for_ever() -> None:
    with refused("too-few-ranks-came", LockstepError, here=0, count=1, seconds=0.2):
        segment.share(dist.HashStore(), "key", 0, 2, 100, timedelta(seconds=0.2))
