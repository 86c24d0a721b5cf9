"""All-reduce through shared memory: the right sum, the same bits on every rank, several at once,
and nobody waits for the dead.
"""

from __future__ import annotations

from datetime import timedelta

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


def noise(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sums(world: lockstep.World) -> dict[str, Tensor]:
    assert world.group.memory is not None
    found = {}
    counts = {
        "one": 1,
        "a piece": PIECE // 4,
        "a piece and one": PIECE // 4 + 1,
        "more than there are slots": (SLOTS + 2) * PIECE // 4 - 3,
    }
    for name, count in counts.items():
        found[name] = collectives.all_reduce(noise(world.rank, count), algorithm="shared_memory")
    for dtype in (torch.bfloat16, torch.float16):
        found[str(dtype)] = collectives.all_reduce(
            noise(world.rank, 1000, dtype), "mean", algorithm="shared_memory"
        )
    return found


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_everybody_has_the_bits_of_the_balanced_tree(workers: int) -> None:
    everyone = run_ranks(sums, workers)
    for name, first in everyone[0].items():
        assert all(torch.equal(found[name], first) for found in everyone), name
        if first.dtype == torch.float32:
            assert torch.equal(
                first, folded([noise(rank, len(first)) for rank in range(workers)])
            ), name
        else:
            exact = torch.stack(
                [noise(rank, 1000, first.dtype).double() for rank in range(workers)]
            ).mean(0)
            assert torch.equal(first, exact.to(first.dtype)) or torch.allclose(
                first.double(), exact, rtol=1e-2, atol=1e-3
            )


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
def test_large_tensors_are_added_up_slice_by_slice(workers: int) -> None:
    run_ranks(by_slices, workers)


def test_the_tree_is_balanced_over_pairs_of_neighbours() -> None:
    big, tiny = torch.tensor([1.0]), torch.tensor([2.0**-24])
    # ((1 + t) + (t + t)); one after the other it would stay 1
    assert folded([big, tiny, tiny, tiny]).item() == 1 + 2.0**-23
    assert folded([tiny, big, tiny]).item() == 1  # ((t + 1) + t)


def in_flight(world: lockstep.World) -> list[float]:
    """Twelve at once, large and small, waited for in another order on each rank; in between
    others that go another way.
    """
    sizes = [3, 3 * PIECE // 4, 10, (SLOTS + 1) * PIECE // 4] * 3
    tensors = [torch.full((size,), float(number + world.rank)) for number, size in enumerate(sizes)]
    handles = [
        collectives.all_reduce(tensor, algorithm="shared_memory", async_op=True)
        for tensor in tensors
    ]
    other = collectives.all_reduce(torch.ones(5), algorithm="native", async_op=True)
    order = torch.randperm(
        len(tensors), generator=torch.Generator().manual_seed(world.rank)
    ).tolist()
    for number in order:
        handles[number].wait()
    assert other is not None
    other.wait()
    return [tensor.unique().item() for tensor in tensors]


def test_many_are_in_flight_and_waited_for_in_any_order() -> None:
    assert run_ranks(in_flight, 3) == [[3.0 * number + 3 for number in range(12)]] * 3


def overtaking(world: lockstep.World) -> list[float]:
    """More than there are slots, and another one when the first slots are free again."""
    tensors = [torch.full((3,), float(10 * number + world.rank)) for number in range(SLOTS + 3)]
    handles = [collectives.all_reduce(tensor, async_op=True) for tensor in tensors[:-1]]
    for handle in handles[: SLOTS - 1]:
        handle.wait()
    world.barrier()  # all have read them
    handles.append(collectives.all_reduce(tensors[-1], async_op=True))
    for handle in handles:
        handle.wait()
    return [tensor[0].item() for tensor in tensors]


def test_a_later_one_is_not_written_before_an_earlier_one() -> None:
    assert run_ranks(overtaking, 2) == [[20.0 * n + 1 for n in range(SLOTS + 3)]] * 2


def lost_handles(world: lockstep.World) -> float:
    """What nobody waits for is done when somebody waits for what came after it."""
    for _ in range(3 * SLOTS):
        collectives.all_reduce(torch.ones(7), algorithm="shared_memory", async_op=True)
    return collectives.all_reduce(torch.ones(1), algorithm="shared_memory").item()


def test_a_handle_may_be_forgotten() -> None:
    assert run_ranks(lost_handles, 2) == [2.0, 2.0]


def late(world: lockstep.World) -> str:
    world.group.timeout = timedelta(seconds=0.3)
    if world.rank == 1:
        world._store.wait(["enough"], timedelta(minutes=5))
        world.close(failed=True)
        return ""
    try:
        collectives.all_reduce(torch.ones(3), algorithm="shared_memory")
    except CollectiveTimeout as error:
        world.close(failed=True)
        return str(error)
    finally:
        world._store.set("enough", "")
    return "nothing"


def test_who_does_not_come_is_named() -> None:
    said = run_ranks(late, 2)[0]
    assert said.startswith("#1: all_reduce sum f32[3] at test_operations.py")
    assert "rank 1 did not come within the timeout of 0.3 s" in said
    assert said.endswith("[collective-timeout]")


def waited_for_again(world: lockstep.World) -> list[float]:
    """Rank 1 has written its first pieces, and adds up its share only after rank 0 has given up."""
    tensor = torch.full((2 * PIECE // 4 + 5,), 1.0 + world.rank)
    handle = collectives.all_reduce(tensor, async_op=True)
    if world.rank == 1:
        world._store.wait(["given up"], timedelta(minutes=5))
    else:
        with refused("collective-timeout", CollectiveTimeout, missing=[1]) as caught:
            handle.wait(timedelta(seconds=0.3))
        assert caught.value.values["seconds"] == 0.3
        world._store.set("given up", "")
    handle.wait()
    return tensor.unique().tolist()  # type: ignore[no-any-return]


def test_a_wait_has_a_timeout_of_its_own_and_can_be_repeated() -> None:
    assert run_ranks(waited_for_again, 2) == [[3.0]] * 2


def in_torchs_call(world: lockstep.World, size: int) -> list[float]:
    """Rank 1 has started a sum, and is in a call of torch.distributed for which rank 0 comes when
    it has waited for the sum.
    """
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
    assert run_ranks(in_torchs_call, 2, args=(size,)) == [[3.0]] * 2


def before_and_after(world: lockstep.World) -> float:
    tensor = torch.ones(PIECE)
    handle = collectives.all_reduce(tensor, async_op=True)
    if world.rank == 0:
        handle.wait()
    world.barrier(timedelta(seconds=10))
    handle.wait()
    return tensor[-1].item()


def test_a_barrier_keeps_nobody_up_who_waits_for_what_was_started_before_it() -> None:
    assert run_ranks(before_and_after, 2) == [2.0] * 2


def not_writable(world: lockstep.World) -> float:
    with pytest.raises(RuntimeError, match="single memory location"):
        collectives.all_reduce(torch.ones(1).expand(5))
    return collectives.all_reduce(torch.ones(1)).item()


def test_a_tensor_that_cannot_hold_the_sum_keeps_no_later_one_up() -> None:
    assert run_ranks(not_writable, 2) == [2.0] * 2


def test_elsewhere_it_is_refused() -> None:
    with (
        lockstep.init(backend="gloo"),
        refused("shared-memory-impossible", what="algorithm='shared_memory'"),
    ):
        collectives.all_reduce(torch.ones(2), algorithm="shared_memory")


def without(world: lockstep.World) -> tuple[bool, list[float]]:
    world.close()
    module.possible = lambda: False  # type: ignore[attr-defined]
    with lockstep.init(backend="gloo") as plain:
        return plain.group.memory is None, collectives.all_reduce(torch.ones(2)).tolist()


def test_auto_takes_another_way_where_it_is_not_there() -> None:
    assert run_ranks(without, 2) == [(True, [2.0, 2.0])] * 2
