"""all_reduce, broadcast and all_gather over real ranks, with different data on each, against
what the definitions say.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep import collectives
from lockstep.errors import UsageError
from lockstep.testing import run_ranks
from tests.refused import refused

WORKERS = [1, 2, 3, 4]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
]


def mine(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(1, 8).add(3 * rank).remainder(7).to(dtype)


def reduce_every_way(
    world: lockstep.World, algorithm: str
) -> list[tuple[str, torch.dtype, Tensor]]:
    found = []
    for dtype in DTYPES:
        for op in ("sum", "max", "min", "prod", "mean"):
            if op == "mean" and not dtype.is_floating_point:
                continue
            tensor = mine(world.rank, dtype)
            returned = collectives.all_reduce(tensor, op, algorithm=algorithm)  # type: ignore[arg-type]
            assert returned is tensor
            found.append((op, dtype, tensor))
    return found


@pytest.mark.parametrize("algorithm", ["native", "central"])
@pytest.mark.parametrize("workers", WORKERS)
def test_all_reduce_is_what_its_name_says(workers: int, algorithm: str) -> None:
    everyone = run_ranks(reduce_every_way, workers, args=(algorithm,))
    for found in everyone:
        for op, dtype, tensor in found:
            stacked = torch.stack([mine(rank, dtype).double() for rank in range(workers)])
            expected = {
                "sum": stacked.sum(0),
                "mean": stacked.mean(0),
                "prod": stacked.prod(0),
                "max": stacked.amax(0),
                "min": stacked.amin(0),
            }
            tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-6)
            torch.testing.assert_close(
                tensor.double(),
                expected[op].to(dtype).double(),
                rtol=tolerance,
                atol=0,
                msg=f"{op} {dtype}",
            )


def odd_tensors(world: lockstep.World, algorithm: str) -> dict[str, Tensor]:
    wide = torch.arange(24.0).view(4, 6) * (world.rank + 1)
    tensors = {
        "transposed": wide.t(),
        "strided": wide[:, ::2],
        "0-d": torch.tensor(2.0 * world.rank + 1),
        "empty": torch.empty(0, 3),
    }
    for tensor in tensors.values():
        collectives.all_reduce(tensor, algorithm=algorithm)  # type: ignore[arg-type]
    return {"whole": wide, **tensors}


@pytest.mark.parametrize("algorithm", ["native", "central"])
def test_strided_scalar_and_empty_tensors(algorithm: str) -> None:
    for found in run_ranks(odd_tensors, 3, args=(algorithm,)):
        whole = torch.arange(24.0).view(4, 6) * 6
        # the transposed view was summed first (1 + 2 + 3), then every other column once more over 3
        # equal ranks
        whole[:, ::2] *= 3
        assert torch.equal(found["whole"], whole)
        assert found["0-d"].item() == 1 + 3 + 5
        assert found["empty"].shape == (0, 3)


def gather_and_broadcast(world: lockstep.World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = torch.arange(4).view(2, 2) + 10 * world.rank
    column = torch.full((3, 2), float(world.rank))
    collectives.broadcast(column[:, 1], root=world.size - 1)
    return (
        collectives.all_gather(rows),
        collectives.all_gather(torch.tensor(float(world.rank))),
        collectives.all_gather(torch.empty(0, 2)),
        column,
    )


@pytest.mark.parametrize("workers", WORKERS)
def test_all_gather_joins_in_the_order_of_ranks_and_broadcast_keeps_strides(workers: int) -> None:
    for rank, (rows, scalars, empty, column) in enumerate(run_ranks(gather_and_broadcast, workers)):
        assert rows.tolist() == [
            row
            for other in range(workers)
            for row in ([10 * other, 10 * other + 1], [10 * other + 2, 10 * other + 3])
        ]
        assert scalars.tolist() == list(range(workers))
        assert empty.shape == (0, 2)
        assert column.tolist() == [[rank, workers - 1]] * 3


def several_in_flight(world: lockstep.World) -> list[float]:
    tensors = [torch.full((1000,), float(world.rank + 10 * number)) for number in range(5)]
    handles = [collectives.all_reduce(tensor, "mean", async_op=True) for tensor in tensors]
    for handle in reversed(handles):
        handle.wait()
    return [tensor[-1].item() for tensor in tensors]


def test_several_may_be_in_flight_and_a_mean_divides_once() -> None:
    assert run_ranks(several_in_flight, 3) == [[1.0, 11.0, 21.0, 31.0, 41.0]] * 3


def among_some(world: lockstep.World) -> tuple[float, float]:
    mine = [2, 0] if world.rank in (0, 2) else [1]
    group = world.subgroup(mine)
    gathered = collectives.all_gather(torch.tensor(float(world.rank)), group=group)
    total = collectives.all_reduce(torch.tensor(1.0 + world.rank), group=group)
    assert gathered.tolist() == [float(rank) for rank in mine]
    with pytest.raises(UsageError, match=r"\[not-in-subgroup\]"):
        world.subgroup([(world.rank + 1) % 3])
    return total.item(), group.rank


def test_subgroups_count_in_their_own_order() -> None:
    assert run_ranks(among_some, 3) == [(4.0, 1), (2.0, 0), (4.0, 0)]


def wrong_arguments(world: lockstep.World) -> None:
    tensor = torch.zeros(2)
    with refused("unknown-choice", name="op", value="median"):
        collectives.all_reduce(tensor, "median")  # type: ignore[call-overload]
    with refused("unknown-algorithm", algorithm="star", kind="all_reduce"):
        collectives.all_reduce(tensor, algorithm="star")  # type: ignore[call-overload]
    with refused("mean-of-integers", dtype="int64"):
        collectives.all_reduce(torch.zeros(2, dtype=torch.int64), "mean")
    with refused("root-outside-group", root=2, size=2, last=1):
        collectives.broadcast(tensor, root=2)


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    run_ranks(wrong_arguments, 2)


def test_a_sparse_tensor_is_named_also_where_the_algorithm_is_chosen_by_size() -> None:
    with lockstep.init(), refused("op-of-sparse"):
        collectives.all_reduce(torch.eye(3).to_sparse())


def test_without_a_world_the_error_says_what_to_call() -> None:
    with refused("no-world-open"):
        collectives.all_reduce(torch.zeros(1))


def bytes_of_central(world: lockstep.World) -> int:
    before = world.group.bytes_sent
    collectives.all_reduce(torch.zeros(100), algorithm="central")
    return world.group.bytes_sent - before


def test_central_sends_everything_through_rank_0() -> None:
    assert run_ranks(bytes_of_central, 3) == [800, 400, 400]
