"""The description that proof, runners, network and pictures share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.schedules.algorithms import schedule
from lockstep.schedules.schedule import (
    Kind,
    Transfer,
    spans,
)
from tests.collectives.numbers import NAMED, schedules


def test_a_ring_of_four() -> None:
    """The picture in the module's docstring."""
    first, *_ = rounds = list(schedule("all_reduce", "ring", 4).transfers())
    assert first == [
        Transfer(0, 1, (0,), True),
        Transfer(1, 2, (1,), True),
        Transfer(2, 3, (2,), True),
        Transfer(3, 0, (3,), True),
    ]
    assert [round_[0].cells for round_ in rounds] == [(0,), (3,), (2,), (1,), (0,), (3,)]
    assert rounds[3] == [
        Transfer(0, 1, (1,), False),
        Transfer(1, 2, (2,), False),
        Transfer(2, 3, (3,), False),
        Transfer(3, 0, (0,), False),
    ]


def test_past_the_last_cell_comes_the_first() -> None:
    first, second = schedule("scatter", "tree", 4, root=1).transfers()
    assert [transfer.cells for transfer in (*first, *second)] == [(3, 0), (2,), (0,)]


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_the_shares_of_all_ranks_are_the_whole(kind: Kind, name: str) -> None:
    """A rank's own walk has the messages of the common one, in the same order."""
    for built in (each for world in range(1, 9) for each in schedules(kind, name, world)):
        for rank in range(built.world):
            expected = []
            for transfers in built.transfers():
                sends = [transfer for transfer in transfers if transfer.src == rank]
                receives = [transfer for transfer in transfers if transfer.dst == rank]
                if sends or receives:
                    expected.append((sends, receives))
            assert list(built.of_rank(rank)) == expected


@given(numel=st.integers(0, 1000), cells=st.integers(1, 70))
def test_a_tensor_is_cut_as_torch_cuts_it(numel: int, cells: int) -> None:
    tensor = torch.arange(numel)
    parts = [tensor[start:stop] for start, stop in spans(numel, cells)]
    assert all(map(torch.equal, parts, tensor.tensor_split(cells)))
    assert len(parts) == cells


def test_transfers_are_plain_numbers() -> None:
    """NumPy integers would end up in messages and tags."""
    ((transfer,),) = schedule("broadcast", "tree", 2).transfers()
    assert {type(value) for value in (transfer.src, transfer.dst, *transfer.cells)} == {int}
