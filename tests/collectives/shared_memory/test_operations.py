"""All-reduce through shared memory: the right sum, the same bits, several at once, dead ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from lockstep import collectives
from lockstep.collectives import group as module
from lockstep.collectives.shared_memory.exchange import AT_ONCE, PIECE, SLOTS
from lockstep.errors import CollectiveTimeout
from lockstep.testing import run_ranks
from tests.collectives.numbers import folded
from tests.refused import refused
from tests.teams import on_team


def noise(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


COUNTS = {
    "one": 1,
    "a piece": PIECE // 4,
    "a piece and one": PIECE // 4 + 1,
    "more than there are slots": (SLOTS + 2) * PIECE // 4 - 3,
}


def sums(world: lockstep.World) -> None:
    assert world.group.memory is not None
    for name, count in COUNTS.items():
        total = collectives.all_reduce(noise(world.rank, count), algorithm="shared_memory")
        everyones = [noise(rank, count) for rank in range(world.size)]
        assert torch.equal(total, folded(everyones)), name
    for dtype in (torch.bfloat16, torch.float16):
        everyones = [noise(rank, 1000, dtype) for rank in range(world.size)]
        mean = collectives.all_reduce(
            everyones[world.rank].clone(), "mean", algorithm="shared_memory"
        )
        exact = torch.stack(everyones).double().mean(0)
        torch.testing.assert_close(mean.double(), exact, rtol=1e-2, atol=1e-3)
        for row in collectives.all_gather(mean, as_list=True):
            assert torch.equal(row, mean)


def by_slices(world: lockstep.World) -> None:
    """What is added up slice by slice has the bits of what every rank adds up for itself."""
    for dtype, op in [
        (torch.float32, "sum"),
        (torch.float32, "mean"),
        (torch.float64, "prod"),
        (torch.bfloat16, "mean"),
        (torch.int16, "max"),
        (torch.complex64, "sum"),
    ]:
        large = noise(world.rank, 2 * PIECE // dtype.itemsize + 77).mul(9).to(dtype)
        small = [part.clone() for part in large.split(AT_ONCE // 8)]
        collectives.all_reduce(large, op, algorithm="shared_memory")
        for part in small:
            collectives.all_reduce(part, op, algorithm="shared_memory")
        assert torch.equal(large, torch.cat(small)), (dtype, op)
    askew = noise(world.rank, 300_000).view(500, 600).t()
    summed = collectives.all_reduce(askew.clone(), algorithm="shared_memory")
    collectives.all_reduce(askew, algorithm="shared_memory")
    assert torch.equal(askew, summed)


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("check", [sums, by_slices])
def test_everybody_has_the_bits_of_the_balanced_tree(
    check: Callable[[lockstep.World], None], workers: int
) -> None:
    on_team(check, workers)


def test_the_tree_is_balanced_over_pairs_of_neighbours() -> None:
    big, tiny = torch.tensor([1.0]), torch.tensor([2.0**-24])
    # ((1 + t) + (t + t)); one after the other it would stay 1
    assert folded([big, tiny, tiny, tiny]).item() == 1 + 2.0**-23
    assert folded([tiny, big, tiny]).item() == 1  # ((t + 1) + t)


def resident(length: int) -> int:
    """How many KiB of the mappings of `length` bytes this process has touched."""
    blocks = Path("/proc/self/smaps").read_text().split("/memfd:lockstep")[1:]
    sizes = [[int(line.split()[1]) for line in block.splitlines()[1:5]] for block in blocks]
    return sum(rss for size, _, _, rss in sizes if size == length // 1024)


def touched(world: lockstep.World) -> list[int]:
    assert world.group.memory is not None
    ((*regions,),) = world.group.memory.allocate([2**20 + 1], [torch.float32])
    length = world.size * (2**22 + 4096)
    before = resident(length)
    regions[world.rank].fill_(1)
    return [before, resident(length)]


def test_only_its_owner_touches_memory_before_it_is_summed() -> None:
    """So the pages come from the owner's NUMA node."""
    assert on_team(touched, 2) == [[0, 4100], [0, 4100]]


def in_flight(world: lockstep.World) -> list[float]:
    """Twelve at once, of several kinds, waited for in another order on each rank."""
    sizes = [3, 3 * PIECE // 4, 12, (SLOTS + 1) * PIECE // 4] * 3
    tensors = [torch.full((size,), float(number + world.rank)) for number, size in enumerate(sizes)]
    handles: list[Any] = []
    for number, tensor in enumerate(tensors):
        if number % 4 < 2:
            handles.append(collectives.all_reduce(tensor, async_op=True))
        elif number % 4 == 2:
            handles.append(collectives.reduce_scatter(tensor, async_op=True))
        else:
            handles.append(collectives.broadcast(tensor, 1, async_op=True))
    other: Any = collectives.all_reduce(torch.ones(5), algorithm="native", async_op=True)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(world.rank)).tolist()
    for number in order:
        handles[number].wait()
    other.wait()
    return [handle.wait().unique().item() for handle in handles]


def test_many_of_all_kinds_are_in_flight_and_waited_for_in_any_order() -> None:
    sums = [3.0 * number + 3 for number in range(12)]
    expected = [number + 1.0 if number % 4 == 3 else sums[number] for number in range(12)]
    assert on_team(in_flight, 3) == [expected] * 3


def overtaking(world: lockstep.World) -> list[float]:
    """More than there are slots: the last is not written before an earlier one."""
    tensors = [torch.full((3,), float(10 * number + world.rank)) for number in range(SLOTS + 3)]
    handles = [collectives.all_reduce(tensor, async_op=True) for tensor in tensors[:-1]]
    for handle in handles[: SLOTS - 1]:
        handle.wait()
    world.barrier()  # all have read them
    handles.append(collectives.all_reduce(tensors[-1], async_op=True))
    for handle in handles:
        handle.wait()
    return [tensor[0].item() for tensor in tensors]


def lost_handles(world: lockstep.World) -> float:
    """A handle may be forgotten. What nobody waits for is done when somebody waits for what came after it."""
    for _ in range(3 * SLOTS):
        collectives.all_reduce(torch.ones(7), algorithm="shared_memory", async_op=True)
    return collectives.all_reduce(torch.ones(1), algorithm="shared_memory").item()


def waited_for_again(world: lockstep.World) -> list[float]:
    """A wait has a timeout of its own and can be repeated. Rank 2 has written its first pieces, and
    adds up its share only after rank 1 has given up: a group without rank 0.
    """
    if world.rank == 0:
        return [3.0]
    tensor = torch.full((2 * PIECE // 4 + 5,), float(world.rank))
    group = world.subgroup([1, 2])
    handle = collectives.all_reduce(tensor, group=group, async_op=True)
    if world.rank == 2:
        world._store.wait(["given up"], timedelta(minutes=5))
    else:
        with refused("collective-timeout", CollectiveTimeout, missing=[2]) as refusal:
            handle.wait(timedelta(seconds=0.3))
        assert refusal.value.values["seconds"] == 0.3
        world._store.set("given up", "")
    handle.wait()
    result = tensor.unique().tolist()
    group.timeout = timedelta(seconds=0.3)
    if world.rank == 1:
        with refused("collective-timeout", CollectiveTimeout, missing=[2]):
            collectives.all_reduce(tensor, algorithm="ring", group=group)
    return result  # type: ignore[no-any-return]


def in_torchs_call(world: lockstep.World, size: int) -> list[float]:
    """Rank 1 has started a sum, and is in a call of torch.distributed that waits for rank 0."""
    tensor = torch.full((size,), 1.0 + world.rank)
    handle = collectives.all_reduce(tensor, async_op=True)
    if world.rank == 0 and size * 4 > AT_ONCE:
        with refused("collective-timeout", CollectiveTimeout, missing=[1]):
            handle.wait(timedelta(seconds=0.3))
    elif world.rank == 0:
        handle.wait(timedelta(seconds=30))
    dist.all_reduce(torch.ones(1))
    handle.wait()
    return tensor.unique().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [AT_ONCE // 4, AT_ONCE // 4 + 1])
def test_only_a_large_one_needs_calls_of_ours_to_go_on(size: int) -> None:
    """As docs/guide/collectives.md says."""
    assert on_team(in_torchs_call, 2, args=(size,)) == [[3.0]] * 2


def before_and_after(world: lockstep.World) -> float:
    """A barrier keeps nobody up who waits for what was started before it."""
    tensor = torch.ones(PIECE)
    handle = collectives.all_reduce(tensor, async_op=True)
    if world.rank == 0:
        handle.wait()
    world.barrier(timedelta(seconds=10))
    handle.wait()
    return tensor[-1].item()


def not_writable(world: lockstep.World) -> float:
    """A tensor that cannot hold the sum keeps no later one up."""
    with pytest.raises(RuntimeError, match="single memory location"):
        collectives.all_reduce(torch.ones(1).expand(5))
    return collectives.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (overtaking, [20.0 * number + 1 for number in range(SLOTS + 3)]),
        (lost_handles, 2.0),
        (before_and_after, 2.0),
        (not_writable, 2.0),
    ],
)
def test_of_two_ranks_none_overtakes_and_none_keeps_the_other_up(
    function: Callable[[lockstep.World], object], result: object
) -> None:
    assert on_team(function, 2) == [result] * 2


def test_a_group_that_waits_too_long_names_ranks_of_the_world() -> None:
    assert on_team(waited_for_again, 3) == [[3.0]] * 3


def without(world: lockstep.World) -> tuple[bool, list[float]]:
    world.close()
    module.possible = lambda: False  # type: ignore[attr-defined]
    with lockstep.init(backend="gloo") as plain:
        return plain.group.memory is None, collectives.all_reduce(torch.ones(2)).tolist()


def test_auto_takes_another_way_where_it_is_not_there() -> None:
    assert run_ranks(without, 2) == [(True, [2.0, 2.0])] * 2
