"""Uneven shares: over all ranks every micro-batch is there once, and is the one it always was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.device import WhenAsked
from lockstep.data.loader import Loader
from tests.data.datasets import Augmented, Counted, Numbers, Pairs, Stream
from tests.data.test_loader import by_slot
from tests.refused import refused


def loader(dataset: Any, rank: int, size: int, **options: Any) -> Loader:
    return Loader(
        dataset,
        **(
            {"global_batch": 8, "micro_batch": 2, "device": "cpu", "rank": rank, "size": size}
            | options
        ),
    )


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
        seen = [
            len(dataset.fetched) for _ in next(loader(dataset, rank, 2, balance="3,1").epochs(1))
        ]
        assert seen == [2 * samples, 3 * samples, 4 * samples, 4 * samples]


def test_also_where_an_order_makes_the_micro_batches() -> None:
    options: dict[str, Any] = {
        "order": Pairs(),
        "global_batch": None,
        "micro_batch": None,
        "micro_batches": 2,
    }
    expected = by_slot(1, Numbers(30), **options)
    assert by_slot(2, Numbers(30), balance="0,1", **options) == expected
    assert len(expected) == 3 + 4


def test_given_weights_are_the_shares_of_all_windows() -> None:
    for size, balance in ((2, "3,1"), (3, (2, 1, 1)), (3, (0, 0, 1))):
        assert by_slot(size, Augmented(21), balance=balance) == by_slot(1, Augmented(21))
    ranks = [loader(Numbers(21), rank, 3, balance="2,1,1") for rank in range(3)]
    assert [[list(window.slots) for window in next(each.epochs(1))] for each in ranks] == [
        [[0, 1], [0, 1], [0, 1]],
        [[2], [2], [2]],
        [[3], [3], []],
    ]


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


def test_a_line_says_the_shares() -> None:
    assert (
        loader(Numbers(32), 0, 3, balance="2,1,1").describe()
        == "global batch 8 = 4 micro-batches x 2; 3 ranks: 2, 1, 1"
    )
    assert (
        loader(Numbers(32), 0, 3, balance="1,3,0").describe()
        == "global batch 8 = 4 micro-batches x 2; 3 ranks: 1, 3, 0"
    )


def test_all_ranks_must_have_asked_for_the_same() -> None:
    assert [
        loader(Numbers(32), 0, 2, balance=each).recipe["balance"] for each in (None, (2, 1))
    ] == [None, "2,1"]


def test_a_rank_with_nothing_to_do_starts_no_workers() -> None:
    assert loader(Numbers(32), 0, 2, balance="0,1", num_workers=2)._loader.num_workers == 0
    assert loader(Numbers(32), 5, 6, num_workers=2)._loader.num_workers == 0


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        (
            {"balance": "2,1,1"},
            "balance-of-other-count",
            {"balance": "2,1,1", "given": 3, "workers": 2},
        ),
        (
            {"balance": "2,1", "micro_batch": None},
            "balance-by-rank",
            {"balance": "2,1"},
        ),
        (
            {"balance": "1,1", "global_batch": None, "batch_per_rank": 8},
            "balance-by-rank",
            {"balance": "1,1"},
        ),
        ({"balance": "auto"}, "wrong-value", {"name": "balance", "value": "auto"}),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    options: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        loader(Numbers(32), 0, 2, **options)


def test_a_stream_is_refused() -> None:
    with refused("numbers-of-stream", name="balance", value="1", dataset="Stream"):
        Loader(Stream(), global_batch=8, micro_batch=2, rank=0, size=1, balance="1")
