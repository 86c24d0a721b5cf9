"""Schedules over a list of tensors in one process, against torch's functions on their stack."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.collectives import in_process
from lockstep.schedules.algorithms import algorithms_of
from tests.refused import refused

WORLDS = [1, 2, 3, 4, 5, 8]
SHAPES = [(), (0, 3), (1,), (7,), (3, 5), (11, 2)]
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(0),
    "mean": lambda t: t.mean(0),
    "prod": lambda t: t.prod(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
}
MEANINGFUL = {
    **{
        dtype: ["sum", "mean", "prod", "max", "min"]
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    },
    **{dtype: ["sum", "prod", "max", "min"] for dtype in (torch.int64, torch.int32, torch.int16)},
    **{dtype: ["sum", "mean", "prod"] for dtype in (torch.complex64, torch.complex128)},
    torch.bool: ["max", "min"],
}


def everyones(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Different data on every rank; small whole numbers, so that a product of eight is exact."""
    generator = torch.Generator().manual_seed(world)
    drawn = [torch.randint(-2, 3, shape, generator=generator) for _ in range(world)]
    if dtype.is_complex:
        return [
            torch.complex(each.double(), torch.roll(each.double(), 1)).to(dtype) for each in drawn
        ]
    return [each.to(dtype) for each in drawn]


def expected(tensors: list[Tensor], op: str) -> Tensor:
    dtype = tensors[0].dtype
    wide = {torch.bool: torch.int64, torch.bfloat16: torch.float64}.get(dtype, dtype)
    return OPS[op](torch.stack([tensor.to(wide) for tensor in tensors])).to(dtype)


@pytest.mark.parametrize("dtype", MEANINGFUL, ids=str)
@pytest.mark.parametrize("name", algorithms_of("all_reduce"))
def test_all_reduce(name: str, dtype: torch.dtype) -> None:
    for world in WORLDS:
        for op in MEANINGFUL[dtype]:
            for shape in SHAPES:
                tensors = everyones(world, shape, dtype)
                before, want = [tensor.data_ptr() for tensor in tensors], expected(tensors, op)
                returned = in_process.all_reduce(
                    tensors, op, name, ranks_per_node=3 if name == "hierarchical" else None
                )
                assert all(mine is theirs for mine, theirs in zip(returned, tensors, strict=True))
                assert [tensor.data_ptr() for tensor in tensors] == before
                for tensor in tensors:
                    torch.testing.assert_close(
                        tensor, want, msg=lambda text, at=(world, op, shape): f"{at}: {text}"
                    )


@pytest.mark.parametrize("dtype", MEANINGFUL, ids=str)
def test_reduce_changes_the_root_alone_and_reduce_scatter_nothing(dtype: torch.dtype) -> None:
    for world, op in itertools.product(WORLDS, MEANINGFUL[dtype]):
        for name, root in itertools.product(algorithms_of("reduce"), range(world)):
            tensors = everyones(world, (7,), dtype)
            want = [tensor.clone() for tensor in tensors]
            want[root] = expected(tensors, op)
            torch.testing.assert_close(in_process.reduce(tensors, root, op, name), want)
        for name, shape in itertools.product(algorithms_of("reduce_scatter"), SHAPES[1:]):
            tensors = everyones(world, shape, dtype)
            before = [tensor.clone() for tensor in tensors]
            parts = list(expected(tensors, op).tensor_split(world))
            torch.testing.assert_close(in_process.reduce_scatter(tensors, op, name), parts)
            same([tensors], [before])


def pieces(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Of different lengths: one in three is empty."""
    return [
        (torch.arange(3 * (number % 3)) + 10 * number).view(-1, 3).to(dtype)
        for number in range(count)
    ]


@pytest.mark.parametrize("dtype", MEANINGFUL, ids=str)
def test_what_only_moves(dtype: torch.dtype) -> None:
    for world in WORLDS:
        own = pieces(world, dtype)
        for name in algorithms_of("all_gather"):
            same(in_process.all_gather(own, name), [own] * world)
        for root in range(world):
            for name, shape in itertools.product(algorithms_of("broadcast"), SHAPES):
                tensors = everyones(world, shape, dtype)
                want = [tensors[root].clone()] * world
                same([in_process.broadcast(tensors, root, name)], [want])
            for name in algorithms_of("scatter"):
                same([in_process.scatter(own, root, name)], [own])
            for name in algorithms_of("gather"):
                same([in_process.gather(own, root, name)], [own])
        every = pieces(world * world, dtype)
        rows = [every[rank * world : (rank + 1) * world] for rank in range(world)]
        for name in algorithms_of("all_to_all"):
            same(
                in_process.all_to_all(rows, name),
                [list(column) for column in zip(*rows, strict=True)],
            )


def same(found: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    assert len(found) == len(want)
    for row, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(row, wanted, rtol=0, atol=0)


def test_scalars_are_gathered_and_what_came_is_a_copy() -> None:
    own = [torch.tensor(float(rank)) for rank in range(3)]
    assert in_process.gather(own, root=1) == own
    gathered = in_process.all_gather(own)
    assert gathered == [own] * 3
    for row in gathered:
        for tensor in row:
            tensor.fill_(-1)
    assert own == [0, 1, 2]


@pytest.mark.parametrize("name", algorithms_of("all_reduce"))
def test_tensors_that_are_not_contiguous(name: str) -> None:
    wholes = [torch.arange(24.0).view(4, 6) * (rank + 1) for rank in range(3)]
    want = wholes[0].clone()
    want[:, ::2] *= 6
    views = [whole.t()[::2] for whole in wholes]
    in_process.all_reduce(views, "sum", name, ranks_per_node=2 if name == "hierarchical" else None)
    for rank, whole in enumerate(wholes):
        want[:, 1::2] = torch.arange(24.0).view(4, 6)[:, 1::2] * (rank + 1)
        assert torch.equal(whole, want)


ONE, TWO = torch.ones(2), torch.ones(3)


@pytest.mark.parametrize("kind", ["all_gather", "scatter", "gather", "all_to_all"])
def test_no_ranks_and_mixed_dtypes_are_refused(kind: str) -> None:
    call: Callable[..., object] = getattr(in_process, kind)
    with refused("no-ranks"):
        call([])
    mixed = [[ONE, ONE], [ONE, TWO.int()]] if kind == "all_to_all" else [ONE, TWO.int()]
    with refused("mixed-dtypes", kind=kind, dtypes=["f32", "i32"]):
        call(mixed)


@pytest.mark.parametrize(
    ("name", "arguments", "code", "values"),
    [
        ("all_reduce", ([],), "no-ranks", {}),
        ("all_reduce", ([ONE, TWO],), "tensors-not-alike", {"first": "f32[2]", "form": "f32[3]"}),
        ("broadcast", ([ONE, ONE.int()],), "tensors-not-alike", {"rank": 1, "form": "i32[2]"}),
        ("all_to_all", ([[ONE, ONE], [ONE]],), "tensors-not-one-a-rank", {"count": 1, "size": 2}),
        ("reduce_scatter", ([torch.tensor(1.0)] * 2,), "collective-without-rows", {}),
        ("all_reduce", ([ONE.int()], "mean"), "mean-of-integers", {"dtype": "int32"}),
    ],
)
def test_what_cannot_work_is_said(
    name: str, arguments: tuple[Any, ...], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        getattr(in_process, name)(*arguments)
