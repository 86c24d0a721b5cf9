"""Where cells lie in memory."""

from __future__ import annotations

import pytest
import torch

from lockstep.collectives.cells import FlatCells, LooseCells, edges_of
from lockstep.collectives.reduce_op import COMBINE

EDGES = [0, 2, 3, 3, 5]  # cells of 2, 1, 0 and 2 elements


def flat() -> FlatCells:
    return FlatCells(torch.arange(5), EDGES)


@pytest.mark.parametrize(
    ("cells", "content"),
    [
        ([0], [[0, 1]]),
        ([2], [[]]),
        ([0, 1], [[0, 1, 2]]),
        ([0, 1, 2, 3], [[0, 1, 2, 3, 4]]),
        ([3, 0], [[3, 4], [0, 1]]),
        ([2, 3, 0, 1], [[3, 4], [0, 1, 2]]),
    ],
)
def test_neighbouring_cells_travel_as_one_message(
    cells: list[int], content: list[list[int]]
) -> None:
    assert [part.tolist() for part in flat().outgoing(cells)] == content


def test_what_leaves_is_not_copied_and_what_arrives_lands_in_place() -> None:
    memory = torch.arange(5)
    cells = FlatCells(memory, EDGES)
    cells.incoming([3])[0].fill_(9)
    assert memory.tolist() == [0, 1, 2, 9, 9]


def test_replacing_and_adding_over_the_end() -> None:
    memory = torch.arange(5)
    cells = FlatCells(memory, EDGES)
    cells.replace([3, 0], [torch.tensor([30, 40]), torch.tensor([0, 10])])
    assert memory.tolist() == [0, 10, 2, 30, 40]
    cells.combine([3, 0], [torch.tensor([1, 1]), torch.tensor([2, 2])], "sum")
    assert memory.tolist() == [2, 12, 2, 31, 41]


@pytest.mark.parametrize(
    ("op", "result"),
    [("sum", [4, 0]), ("mean", [4, 0]), ("prod", [3, -4]), ("max", [3, 2]), ("min", [1, -2])],
)
def test_operations(op: str, result: list[int]) -> None:
    held = torch.tensor([1, -2])
    COMBINE[op](held, torch.tensor([3, 2]), out=held)
    assert held.tolist() == result


def test_max_and_min_keep_nan() -> None:
    for op in ("max", "min"):
        held = torch.tensor([float("nan"), 1.0])
        COMBINE[op](held, torch.tensor([1.0, float("nan")]), out=held)
        assert held.isnan().all()


def test_loose_pieces_are_packed_and_unpacked() -> None:
    sizes = [2, 0, 1]
    sender = LooseCells(
        {0: torch.tensor([1, 2]), 1: torch.empty(0, dtype=torch.int64), 2: torch.tensor([3])},
        sizes,
        torch.empty(0, dtype=torch.int64),
    )
    receiver = LooseCells({}, sizes, torch.empty(0, dtype=torch.int64))
    (packed,) = sender.outgoing([2, 0, 1])
    assert packed.tolist() == [3, 1, 2]
    (room,) = receiver.incoming([2, 0, 1])
    assert (room.shape, room.dtype) == (packed.shape, packed.dtype)
    receiver.replace([2, 0, 1], [room.copy_(packed)])
    assert {cell: tensor.tolist() for cell, tensor in receiver.held.items()} == {
        2: [3],
        0: [1, 2],
        1: [],
    }


def test_loose_pieces_are_never_reduced() -> None:
    with pytest.raises(AssertionError, match="moved, never reduced"):
        LooseCells({}, [], torch.empty(0)).combine([0], [torch.empty(0)], "sum")


def test_edges() -> None:
    assert edges_of([2, 1, 0, 2]) == EDGES
    assert edges_of([]) == [0]
