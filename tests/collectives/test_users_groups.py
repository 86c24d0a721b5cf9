"""Process groups of the user's own: compared, and summed through the memory of the host."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
import lockstep.backend  # noqa: F401
from lockstep import collectives
from lockstep.collectives import group as module
from lockstep.collectives.api import resolve
from lockstep.errors import CollectiveMismatch, CollectiveTimeout
from lockstep.runtime import status
from lockstep.testing import run_ranks
from tests.refused import refused


@contextmanager
def opened(world: lockstep.World, backend: str = "gloo", **options: Any) -> Iterator[int]:
    """A process group of torch's own, in the place of the world that run_ranks has opened."""
    world.close()
    number = world._store.add(f"opened by {world.rank}", 1)
    # a store for each: in a common one gloo may find the addresses of an earlier group
    store = dist.PrefixStore(f"group {number}", world._store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, **options)
    try:
        yield world.rank
    finally:
        dist.destroy_process_group()


def all_and_some(world: lockstep.World, backend: str) -> list[float]:
    with opened(world, backend) as rank, pytest.MonkeyPatch.context() as patch:
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
            patch.setattr(dist, name, None)
        total = collectives.all_reduce(torch.tensor([1.0 + rank]))
        some = collectives.all_reduce(
            torch.full((100_000,), 1.0 + rank), group=groups[rank % 2], async_op=True
        )
        rows = collectives.reduce_scatter(torch.arange(3.0) * (rank + 1))
        root = collectives.broadcast(torch.tensor([float(rank)]), 1)
        return [total.item(), *some.wait().unique().tolist(), rows.item(), root.item()]  # type: ignore[attr-defined]


def over_both(world: lockstep.World) -> list[list[float]]:
    return [all_and_some(world, backend) for backend in ("gloo", "lockstep")]


def test_the_whole_group_and_its_parts_ask_the_backend_for_nothing() -> None:
    assert run_ranks(over_both, 3) == [
        [[6.0, 4.0, 0.0, 1.0]] * 2,
        [[6.0, 2.0, 6.0, 1.0]] * 2,
        [[6.0, 4.0, 12.0, 1.0]] * 2,
    ]


def apart(world: lockstep.World) -> tuple[bool, float]:
    """Ranks of several hosts go over the backend."""
    with opened(world) as rank, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "this_host", lambda: f"host {rank}")
        total = collectives.all_reduce(torch.tensor([1.0 + rank]))
        return resolve(None).memory is None, total.item()


def differ(world: lockstep.World) -> str:
    """Different collectives are named."""
    with (
        opened(world) as rank,
        refused("collective-mismatch", CollectiveMismatch) as refusal,
    ):
        collectives.all_reduce(torch.zeros(40_000 + rank))
    return str(refusal.value.values["calls"])


def first_alone(world: lockstep.World, folder: Path) -> tuple[float, bool]:
    """Rank 1 comes to the very first collective when rank 0 has waited as long as the user said;
    then both do it. Whether rank 0 still seems to wait in between.
    """
    store = world._store
    with opened(world, timeout=timedelta(seconds=2)) as rank:
        status.open_page(folder, rank)
        if rank == 0:
            with refused("collective-timeout", CollectiveTimeout, missing=[1], seconds=2.0):
                collectives.all_reduce(torch.zeros(1))
            store.set("given up first", "")
        store.wait(["given up first"], timedelta(minutes=5))
        page = status.read(status.file_of(folder, rank))
        assert page is not None
        return collectives.all_reduce(torch.tensor([1.0 + rank])).item(), page.waits


def freed(world: lockstep.World) -> bool:
    """Whether the memory goes with the process group, after the first collective of the next."""
    with opened(world):
        collectives.all_reduce(torch.zeros(1))
        memory = resolve(None).memory
        assert memory is not None
        first = weakref.ref(memory)
        del memory
    with opened(world) as rank:
        assert collectives.all_reduce(torch.tensor([1.0 + rank])).item() == 3.0
        gc.collect()
        return first() is None


def then_adopted(world: lockstep.World) -> list[float]:
    """A World that adopts it uses its memory, and leaves it open."""
    with opened(world) as rank:
        sums = [collectives.all_reduce(torch.tensor([1.0 + rank])).item()]
        memory = resolve(None).memory
        with lockstep.init() as adopting:
            assert adopting.group.memory is memory
            sums.append(adopting.mean(float(rank), 1.0))
        sums.append(collectives.all_reduce(torch.tensor([2.0 + rank])).item())
        assert resolve(None).memory not in (None, memory)
        return sums


def of_two(world: lockstep.World, folder: Path) -> list[Any]:
    functions = (apart, differ, freed, then_adopted)
    return [function(world) for function in functions] + [first_alone(world, folder)]


def test_groups_of_two_ranks(tmp_path: Path) -> None:
    for results in run_ranks(of_two, 2, args=(tmp_path,)):
        over_the_backend, calls, memory_freed, sums, after_timeout = results
        assert over_the_backend == (True, 3.0)
        assert re.fullmatch(
            r"rank 0 all_reduce sum f32\[40000\] at test_users_groups.py:\d+; "
            r"rank 1 all_reduce sum f32\[40001\] at test_users_groups.py:\d+",
            calls,
        )
        assert memory_freed
        assert sums == [3.0, 0.5, 5.0]

        assert after_timeout == (3.0, False)
