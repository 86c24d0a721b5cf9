"""Broadcast, all-gather and reduce-scatter through shared memory give what the backend gives, at
the edges too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep import collectives
from lockstep.collectives.shared_memory.exchange import PIECE, SLOTS
from lockstep.errors import WorkerFailed
from lockstep.testing import run_ranks
from tests.refused import refused


def noise(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> Tensor:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 5
    return found > 0 if dtype == torch.bool else found.to(dtype)


SHAPES = [(), (0, 3), (1,), (7, 3), (PIECE // 4 + 5,), ((SLOTS + 1) * PIECE // 4 + 1,)]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.complex64,
]


def everything(world: lockstep.World, algorithm: Any) -> list[Tensor]:
    found = []
    for shape in SHAPES:
        for dtype in DTYPES if len(shape) != 1 else DTYPES[:1]:
            tensor = noise(shape, world.rank, dtype)
            found.append(collectives.broadcast(tensor.clone(), world.size - 1, algorithm=algorithm))
            found.append(collectives.all_gather(tensor, algorithm=algorithm))
            if shape:
                # other lengths
                found.append(collectives.all_gather(tensor[: world.rank + 1], algorithm=algorithm))
                op = "max" if dtype == torch.bool else "sum"
                found.append(collectives.reduce_scatter(tensor, op, algorithm=algorithm))
            if len(shape) == 2:
                askew = noise((3, 7), world.rank, dtype).t()
                found.append(
                    collectives.broadcast(
                        askew.clone().t().contiguous().t(), 0, algorithm=algorithm
                    )
                )
                found.append(collectives.all_gather(askew, algorithm=algorithm))
    found.append(
        collectives.reduce_scatter(
            noise((5, 2), world.rank, torch.float32), "mean", algorithm=algorithm
        )
    )
    return found


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_they_give_what_the_backend_gives(workers: int) -> None:
    for native, ours in zip(
        run_ranks(everything, workers, args=("native",)),
        run_ranks(everything, workers, args=("shared_memory",)),
        strict=True,
    ):
        for expected, found in zip(native, ours, strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            if expected.is_floating_point() or expected.is_complex():
                tolerance = 4e-2 if expected.dtype == torch.bfloat16 else 1e-4
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            else:
                assert torch.equal(found, expected)


def chosen(world: lockstep.World, backend_raises: bool) -> list[int]:
    if backend_raises:
        for name in (
            "all_reduce",
            "broadcast",
            "all_gather",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
        ):
            setattr(torch.distributed, name, None)
    mine = torch.full((world.size,), world.rank)
    return [
        collectives.all_reduce(mine.clone())[0].item(),
        collectives.broadcast(mine.clone(), 1)[0].item(),
        collectives.all_gather(mine[:1]).sum().item(),
        collectives.reduce_scatter(mine)[0].item(),
    ]


def test_auto_takes_it_and_asks_the_backend_for_nothing() -> None:
    assert run_ranks(chosen, 3, args=(True,)) == [[3, 1, 3, 3]] * 3


def alone(world: lockstep.World) -> None:
    collectives.broadcast(torch.ones(1), algorithm="shared_memory")


def test_one_rank_shares_with_nobody() -> None:
    with pytest.raises(
        WorkerFailed, match=r"algorithm='shared_memory' .*\[shared-memory-impossible\]"
    ):
        run_ranks(alone, 1)


def wrong_root(world: lockstep.World) -> None:
    with refused("root-outside-group", root=2, size=2):
        collectives.broadcast(torch.ones(1), 2, algorithm="shared_memory")


def test_a_root_outside_is_refused() -> None:
    run_ranks(wrong_root, 2)


def mixed_flight(world: lockstep.World) -> list[float]:
    """Different kinds at once, waited for backwards."""
    tensors = [
        torch.full((PIECE // 4 + number,), float(world.rank + number)) for number in range(6)
    ]
    handles: list[Any] = []
    for number, tensor in enumerate(tensors):
        if number % 3 == 0:
            handles.append(collectives.all_reduce(tensor, async_op=True))
        elif number % 3 == 1:
            handles.append(collectives.broadcast(tensor, 1, async_op=True))
        else:
            handles.append(collectives.reduce_scatter(tensor, async_op=True))
    return [handle.wait().unique().item() for handle in reversed(handles)][::-1]


def test_kinds_are_in_flight_together() -> None:
    assert run_ranks(mixed_flight, 2) == [[1.0, 2.0, 5.0, 7.0, 5.0, 11.0]] * 2
