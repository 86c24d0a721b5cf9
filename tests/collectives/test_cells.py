"""Where cells lie in memory. What is sent and added is in test_in_process.py."""

from __future__ import annotations

import pytest
import torch

from lockstep.collectives.cells import FlatCells
from lockstep.collectives.reduce_op import COMBINE

EDGES = [0, 2, 3, 3, 5]  # cells of 2, 1, 0 and 2 elements


@pytest.mark.parametrize(
    ("cells", "content"),
    [
        ([2], [[]]),
        ([0, 1, 2, 3], [[0, 1, 2, 3, 4]]),
        ([3, 0], [[3, 4], [0, 1]]),
        ([2, 3, 0, 1], [[3, 4], [0, 1, 2]]),
    ],
)
def test_neighbouring_cells_travel_as_one_message(
    cells: list[int], content: list[list[int]]
) -> None:
    flat = FlatCells(torch.arange(5), EDGES)
    assert [part.tolist() for part in flat.outgoing(cells)] == content


def test_replacing_and_adding_over_the_end() -> None:
    memory = torch.arange(5)
    cells = FlatCells(memory, EDGES)
    cells.incoming([3])[0].fill_(9)
    assert memory.tolist() == [0, 1, 2, 9, 9], "what arrives lands in its place"
    cells.replace([3, 0], [torch.tensor([30, 40]), torch.tensor([0, 10])])
    assert memory.tolist() == [0, 10, 2, 30, 40]
    cells.combine([3, 0], [torch.tensor([1, 1]), torch.tensor([2, 2])], "sum")
    assert memory.tolist() == [2, 12, 2, 31, 41]


def test_max_and_min_keep_nan() -> None:
    for op in ("max", "min"):
        held = torch.tensor([float("nan"), 1.0])
        COMBINE[op](held, torch.tensor([1.0, float("nan")]), out=held)
        assert held.isnan().all()
