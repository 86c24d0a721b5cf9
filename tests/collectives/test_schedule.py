"""The description that proof, runners, network and pictures share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.collectives.algorithms import schedule
from lockstep.collectives.schedule import (
    REDUCING,
    Kind,
    Transfer,
    held_before,
    spans,
    wanted_after,
)
from tests.collectives.numbers import KINDS, NAMED, schedules


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
    (only,) = schedule("scatter", "tree", 2, root=1).transfers()
    assert only == [Transfer(1, 0, (0,), False)]
    cells = [
        transfer.cells
        for transfers in schedule("scatter", "tree", 4, root=1).transfers()
        for transfer in transfers
    ]
    assert cells == [(3, 0), (2,), (0,)]


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_the_shares_of_all_ranks_are_the_whole(kind: Kind, name: str) -> None:
    """A rank's own walk has the messages of the common one, in the same order, from the sender's
    side and from the receiver's.
    """
    for built in (each for world in range(1, 9) for each in schedules(kind, name, world)):
        for rank in range(built.world):
            expected = []
            for transfers in built.transfers():
                sends = [transfer for transfer in transfers if transfer.src == rank]
                receives = [transfer for transfer in transfers if transfer.dst == rank]
                if sends or receives:
                    expected.append((sends, receives))
            assert list(built.of_rank(rank)) == expected


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, name in NAMED if kind not in REDUCING]
)
def test_backwards_twice_is_forwards(kind: Kind, name: str) -> None:
    for built in (each for world in range(1, 9) for each in schedules(kind, name, world)):
        assert list(built.reversed(kind).reversed(kind).transfers()) == list(built.transfers())


@given(numel=st.integers(0, 1000), cells=st.integers(1, 70))
def test_a_tensor_is_cut_as_torch_cuts_it(numel: int, cells: int) -> None:
    parts = torch.arange(numel).tensor_split(cells)
    assert [torch.arange(numel)[start:stop].tolist() for start, stop in spans(numel, cells)] == [
        part.tolist() for part in parts
    ]


@given(st.sampled_from(KINDS), st.integers(1, 9))
def test_every_cell_has_an_owner_before_and_after(kind: Kind, world: int) -> None:
    cells = {"all_to_all": world * world, "broadcast": 1, "reduce": 1}.get(kind, world)
    for side in (held_before, wanted_after):
        sides = [side(kind, world, rank, 0, cells) for rank in range(world)]
        assert set().union(*sides) == set(range(cells))


def test_all_to_all_is_numbered_by_sender_then_receiver() -> None:
    assert list(held_before("all_to_all", 3, 1, 0, 9)) == [3, 4, 5]
    assert list(wanted_after("all_to_all", 3, 1, 0, 9)) == [1, 4, 7]


def test_transfers_are_plain_numbers() -> None:
    """NumPy integers would end up in messages and tags."""
    (transfers,) = schedule("broadcast", "tree", 2).transfers()
    assert all(
        type(value) is int for value in (transfers[0].src, transfers[0].dst, *transfers[0].cells)
    )
    assert schedule("broadcast", "tree", 2).rounds[0].src.dtype == np.int64
