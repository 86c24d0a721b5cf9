"""Broadcast, all-gather and reduce-scatter through shared memory give what the backend gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep import collectives
from lockstep.collectives.shared_memory.exchange import PIECE, SLOTS
from tests.refused import refused
from tests.teams import on_team


def noise(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 5
    return drawn > 0 if dtype == torch.bool else drawn.to(dtype)


SHAPES = [(), (0, 3), (1,), (7, 3), (PIECE // 4 + 5,), ((SLOTS + 1) * PIECE // 4 + 1,)]


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool]
DTYPES += [torch.complex64]


def everything(world: lockstep.World, algorithm: Any) -> Iterator[Tensor]:
    for shape in SHAPES:
        for dtype in DTYPES if len(shape) != 1 else DTYPES[:1]:
            tensor = noise(shape, world.rank, dtype)
            yield collectives.broadcast(tensor.clone(), world.size - 1, algorithm=algorithm)
            yield collectives.all_gather(tensor, algorithm=algorithm)
            if shape:
                # other lengths
                yield collectives.all_gather(tensor[: world.rank + 1], algorithm=algorithm)
                op = "max" if dtype == torch.bool else "sum"
                yield collectives.reduce_scatter(tensor, op, algorithm=algorithm)
            if len(shape) == 2:
                askew = noise((3, 7), world.rank, dtype).t()
                yield collectives.broadcast(
                    askew.clone().t().contiguous().t(), 0, algorithm=algorithm
                )
                yield collectives.all_gather(askew, algorithm=algorithm)
    rows = noise((5, 2), world.rank, torch.float32)
    yield collectives.reduce_scatter(rows, "mean", algorithm=algorithm)


def both_ways(world: lockstep.World) -> None:
    native, ours = (list(everything(world, way)) for way in ("native", "shared_memory"))
    for expected, result in zip(native, ours, strict=True):
        exact = not (expected.is_floating_point() or expected.is_complex())
        tolerance = 0.0 if exact else 4e-2 if expected.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("workers", [2, 3, pytest.param(8, marks=pytest.mark.rest)])
def test_they_give_what_the_backend_gives(workers: int) -> None:
    on_team(both_ways, workers)


def chosen(world: lockstep.World) -> list[int]:
    mine = torch.full((world.size,), world.rank)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
            patch.setattr(torch.distributed, name, None)
        with refused("root-outside-group", root=3, size=3):
            collectives.broadcast(mine, 3, algorithm="shared_memory")
        return [
            collectives.all_reduce(mine.clone())[0].item(),
            collectives.broadcast(mine.clone(), 1)[0].item(),
            collectives.all_gather(mine[:1]).sum().item(),
            collectives.reduce_scatter(mine)[0].item(),
        ]


def test_auto_takes_it_and_asks_the_backend_for_nothing() -> None:
    assert on_team(chosen, 3) == [[3, 1, 3, 3]] * 3


def test_one_rank_shares_with_nobody() -> None:
    for collective in (collectives.broadcast, collectives.all_reduce):
        with (
            lockstep.init(backend="gloo"),
            refused("shared-memory-impossible", what="algorithm='shared_memory'"),
        ):
            collective(torch.ones(1), algorithm="shared_memory")
