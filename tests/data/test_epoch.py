"""Uneven shares: over all ranks every micro-batch is there once, and is the one it always was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.device import WhenAsked
from lockstep.data.loader import Loader
from tests.data.datasets import Augmented, Counted, Numbers, Stream
from tests.data.test_loader import by_slot
from tests.data.test_window_loader import OF_BATCHES
from tests.refused import refused


def loader(dataset: Any, rank: int, size: int, **options: Any) -> Loader:
    sizes: dict[str, Any] = {"global_batch": 8, "micro_batch": 2}
    return Loader(dataset, **(sizes | options), device="cpu", rank=rank, size=size)


@st.composite
def weights(draw: st.DrawFn) -> tuple[int, ...]:
    """Weights of one to four ranks, not all 0."""
    drawn = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    return tuple(drawn)


@given(weights())
@settings(max_examples=40)
def test_any_weights_leave_every_micro_batch_once_and_as_it_was(balance: tuple[int, ...]) -> None:
    assert by_slot(len(balance), Augmented(21), balance=balance) == by_slot(1, Augmented(21))


def test_also_with_loader_workers() -> None:
    expected = by_slot(1, Augmented(21))
    assert by_slot(2, Augmented(21), balance="1,3", num_workers=2) == expected
    assert by_slot(2, Augmented(21), balance="4,0", num_workers=1) == expected


def test_what_is_fetched_ahead_is_the_next_window_of_this_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WhenAsked, "ahead", True)
    for rank, samples in ((0, 6), (1, 2)):
        dataset = Counted(32)
        epoch = next(loader(dataset, rank, 2, balance="3,1").epochs(1))
        seen = [len(dataset.fetched) for _ in epoch]
        assert seen == [2 * samples, 3 * samples, 4 * samples, 4 * samples]


def test_also_where_an_order_makes_the_micro_batches() -> None:
    expected = by_slot(1, Numbers(30), **OF_BATCHES)
    assert by_slot(2, Numbers(30), balance="0,1", **OF_BATCHES) == expected
    assert len(expected) == 3 + 4


def test_given_weights_are_the_shares_of_all_windows() -> None:
    ranks = [loader(Numbers(21), rank, 3, balance="2,1,1") for rank in range(3)]
    assert [[list(window.slots) for window in next(ours.epochs(1))] for ours in ranks] == [
        [[0, 1], [0, 1], [0, 1]],
        [[2], [2], [2]],
        [[3], [3], []],
    ]
    for balance, shares in (("2,1,1", "2, 1, 1"), ((1, 3, 0), "1, 3, 0")):
        ours = loader(Numbers(32), 0, 3, balance=balance)
        assert ours.describe().endswith(f"; 3 ranks: {shares}")
        assert ours.recipe["balance"] == shares.replace(" ", "")  # ranks compare it


def test_the_position_knows_no_shares() -> None:
    """Saved in the middle of an epoch on one rank, continued on two with uneven shares."""
    first = loader(Numbers(21), 0, 1)
    seen = []
    for window in next(first.epochs(1)):
        seen += [index for batch in window for index in batch.tolist()]
        break
    state = first.state_dict()
    for rank in range(2):
        then = loader(Numbers(21), rank, 2, balance="1,3")
        then.load_state_dict(state)
        seen += [
            index
            for epoch in then.epochs(1)
            for window in epoch
            for batch in window
            for index in batch.tolist()
        ]
    assert sorted(seen) == list(range(21))


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"balance": "2,1,1"}, "balance-of-other-count", {"given": 3, "workers": 2}),
        ({"balance": "2,1", "micro_batch": None}, "balance-by-rank", {"balance": "2,1"}),
        (
            {"balance": "1,1", "global_batch": None, "batch_per_rank": 8},
            "balance-by-rank",
            {"balance": "1,1"},
        ),
        ({"balance": "1", "dataset": Stream()}, "numbers-of-stream", {"name": "balance"}),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    options: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        loader(**({"dataset": Numbers(32), "rank": 0, "size": 2} | options))
