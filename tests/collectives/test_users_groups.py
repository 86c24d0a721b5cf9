"""Process groups that the user's own code opened, and no World has adopted: their collectives are
compared, and go through the memory of the host.
"""

from __future__ import annotations

import gc
import re
import weakref
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


def opened(world: lockstep.World, backend: str = "gloo", **options: Any) -> int:
    """A process group of torch's own, in the place of run_ranks' world."""
    world.close()
    dist.init_process_group(backend, **options)
    return dist.get_rank()


def without_backend() -> None:
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, None)


def all_and_some(world: lockstep.World, backend: str) -> list[float]:
    rank = opened(world, backend)
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    without_backend()
    mine = groups[rank % 2]
    total = collectives.all_reduce(torch.tensor([1.0 + rank]))
    some = collectives.all_reduce(torch.full((100_000,), 1.0 + rank), group=mine, async_op=True)
    rows = collectives.reduce_scatter(torch.arange(3.0) * (rank + 1))
    found = collectives.broadcast(torch.tensor([float(rank)]), 1)
    return [total.item(), *some.wait().unique().tolist(), rows.item(), found.item()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_the_whole_group_and_its_parts_ask_the_backend_for_nothing(backend: str) -> None:
    assert run_ranks(all_and_some, 3, args=(backend,)) == [
        [6.0, 4.0, 0.0, 1.0],
        [6.0, 2.0, 6.0, 1.0],
        [6.0, 4.0, 12.0, 1.0],
    ]


def apart(world: lockstep.World) -> tuple[bool, float]:
    rank = opened(world)
    module.this_host = lambda: f"host {rank}"  # type: ignore[attr-defined]
    total = collectives.all_reduce(torch.tensor([1.0 + rank]))
    return resolve(None).memory is None, total.item()


def test_ranks_of_several_hosts_go_over_the_backend() -> None:
    assert run_ranks(apart, 2) == [(True, 3.0)] * 2


def differ(world: lockstep.World) -> str:
    rank = opened(world)
    with refused("collective-mismatch", CollectiveMismatch) as caught:
        collectives.all_reduce(torch.zeros(40_000 + rank))
    return str(caught.value.values["calls"])


def test_different_ones_are_named() -> None:
    for calls in run_ranks(differ, 2):
        assert re.fullmatch(
            r"rank 0 all_reduce sum f32\[40000\] at test_users_groups.py:\d+; "
            r"rank 1 all_reduce sum f32\[40001\] at test_users_groups.py:\d+",
            calls,
        )


def patient(world: lockstep.World) -> float:
    store = world._store
    rank = opened(world, timeout=timedelta(seconds=2))
    collectives.all_reduce(torch.zeros(1))
    if rank == 1:
        store.wait(["given up"], timedelta(minutes=5))
        return 0.0
    with refused("collective-timeout", CollectiveTimeout, missing=[1]) as caught:
        collectives.all_reduce(torch.zeros(1))
    store.set("given up", "")
    return float(caught.value.values["seconds"])


def test_they_wait_as_long_as_the_user_said() -> None:
    assert run_ranks(patient, 2) == [2.0, 0.0]


def first_alone(world: lockstep.World, folder: Path) -> tuple[float, bool]:
    """Rank 1 comes to the very first collective when rank 0 has given up; then both do it. Whether
    rank 0 still seems to wait in between.
    """
    store = world._store
    rank = opened(world, timeout=timedelta(seconds=2))
    status.open_page(folder, rank)
    if rank == 0:
        with refused("collective-timeout", CollectiveTimeout, missing=[1]):
            collectives.all_reduce(torch.zeros(1))
        store.set("given up first", "")
    store.wait(["given up first"], timedelta(minutes=5))
    page = status.read(status.file_of(folder, rank))
    assert page is not None
    return collectives.all_reduce(torch.tensor([1.0 + rank])).item(), page.waits


def test_who_does_not_come_to_the_first_one_is_named_and_it_can_be_called_again(
    tmp_path: Path,
) -> None:
    assert run_ranks(first_alone, 2, args=(tmp_path,)) == [(3.0, False)] * 2


def one_after_the_other(world: lockstep.World) -> tuple[bool, float]:
    # a store of its own: in the launcher's, gloo may find the addresses of the first group
    second = dist.PrefixStore("second", world._store)
    rank = opened(world)
    collectives.all_reduce(torch.zeros(1))
    memory = resolve(None).memory
    assert memory is not None
    first = weakref.ref(memory)
    del memory
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=second, rank=rank, world_size=2)
    total = collectives.all_reduce(torch.tensor([1.0 + rank]))
    gc.collect()
    return first() is None, total.item()


def test_the_memory_goes_with_the_process_group() -> None:
    assert run_ranks(one_after_the_other, 2) == [(True, 3.0)] * 2


def then_adopted(world: lockstep.World) -> list[float]:
    rank = opened(world)
    found = [collectives.all_reduce(torch.tensor([1.0 + rank])).item()]
    memory = resolve(None).memory
    with lockstep.init() as adopting:
        assert adopting.group.memory is memory
        found.append(adopting.mean(float(rank), 1.0))
    found.append(collectives.all_reduce(torch.tensor([2.0 + rank])).item())
    assert resolve(None).memory not in (None, memory)
    return found


def test_a_world_that_adopts_it_goes_on_with_what_is_there_and_leaves_it_as_it_was() -> None:
    assert run_ranks(then_adopted, 2) == [[3.0, 0.5, 5.0]] * 2
