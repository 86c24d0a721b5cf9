"""Shares that are uneven, and that move from window to window: over all ranks every micro-batch
is there once, and is the one it always was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.device import WhenAsked
from lockstep.data.loader import Loader
from tests.data.datasets import Augmented, Counted, Numbers, Pairs, Stream
from tests.data.scripted import scripted
from tests.data.test_loader import as_data, by_slot
from tests.refused import refused

Moves = Mapping[int, tuple[int, ...]]


def loader(dataset: Any, rank: int, size: int, **options: Any) -> Loader:
    return Loader(
        dataset,
        **(
            {"global_batch": 8, "micro_batch": 2, "device": "cpu", "rank": rank, "size": size}
            | options
        ),
    )


def moving(
    dataset: Any, size: int, moves: Moves, epochs: int = 2, **options: Any
) -> dict[tuple[int, int, int], Any]:
    """(epoch, step, slot) -> the batch, over all ranks, whose shares move alike."""
    found: dict[tuple[int, int, int], Any] = {}
    for rank in range(size):
        ours = scripted(loader(dataset, rank, size, balance="auto", **options), moves)
        for epoch in ours.epochs(epochs):
            for window in epoch:
                assert len(window) == len(window.slots) == len(window.counts)
                for place, slot in enumerate(window.slots):
                    assert (epoch.number, window.step, slot) not in found
                    found[epoch.number, window.step, slot] = as_data(window[place])
        ours.close()
    return found


@st.composite
def splits(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """Ways to share out 4 micro-batches."""
    edges = sorted(draw(st.lists(st.integers(0, 4), min_size=size - 1, max_size=size - 1)))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, 4], strict=True))


@given(st.data(), st.integers(1, 4))
@settings(max_examples=60)
def test_any_moves_leave_every_micro_batch_once_and_as_it_was(
    data: st.DataObject, size: int
) -> None:
    moves = data.draw(st.dictionaries(st.integers(0, 5), splits(size)))
    assert moving(Augmented(21), size, moves) == by_slot(1, Augmented(21))


def test_also_with_loader_workers_whose_work_ahead_is_of_other_slots() -> None:
    moves = {1: (4, 0), 2: (0, 4), 4: (1, 3)}
    expected = by_slot(1, Augmented(21))
    assert moving(Augmented(21), 2, moves, num_workers=2) == expected
    assert moving(Augmented(21), 2, moves, num_workers=1) == expected


def test_also_where_batches_are_copied_one_window_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WhenAsked, "ahead", True)
    assert moving(Augmented(21), 2, {1: (4, 0), 2: (0, 4), 4: (1, 3)}) == by_slot(1, Augmented(21))


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
    expected = moving(Numbers(30), 1, {}, **options)
    assert moving(Numbers(30), 2, {0: (0, 2), 1: (2, 0), 3: (1, 1)}, **options) == expected
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
    """Saved in the middle of an epoch with uneven shares, gone on with other ones."""
    first = loader(Numbers(21), 0, 1, balance="auto")
    seen = []
    for window in next(first.epochs(1)):
        seen += [index for batch in window for index in batch.tolist()]
        break
    state = first.state_dict()
    for rank in range(2):
        then = scripted(loader(Numbers(21), rank, 2, balance="auto"), {0: (1, 3), 1: (3, 1)})
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
    assert (
        loader(Numbers(32), 0, 2, balance="auto").describe()
        == "global batch 8 = 4 micro-batches x 2; 2 ranks x 2, by measured speed"
    )
    moved = scripted(loader(Numbers(32), 0, 2, balance="auto"), {1: (3, 1)})
    for _ in zip(next(moved.epochs(1)), range(2), strict=False):
        pass
    assert moved.describe().endswith("2 ranks: 3, 1, by measured speed")
    assert moved.share == range(3)


def test_all_ranks_must_have_asked_for_the_same() -> None:
    assert [
        loader(Numbers(32), 0, 2, balance=each).recipe["balance"] for each in (None, "auto", (2, 1))
    ] == [None, "auto", "2,1"]


def test_a_rank_with_nothing_to_do_starts_no_workers_unless_that_may_change() -> None:
    assert loader(Numbers(32), 0, 2, balance="0,1", num_workers=2)._loader.num_workers == 0
    assert loader(Numbers(32), 5, 6, num_workers=2)._loader.num_workers == 0
    assert loader(Numbers(32), 5, 6, num_workers=2, balance="auto")._loader.num_workers == 2


def test_a_window_left_with_its_epoch_is_forgotten() -> None:
    ours = loader(Numbers(32), 0, 2, balance="auto")
    for epoch in ours.epochs(3):
        for _ in epoch:
            break
    with refused("window-before-step"):
        list(next(ours.epochs(1)))


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        (
            {"balance": "2,1,1"},
            "balance-of-other-count",
            {"balance": "2,1,1", "given": 3, "workers": 2},
        ),
        (
            {"balance": "auto", "micro_batch": None},
            "balance-by-rank",
            {"balance": "auto"},
        ),
        (
            {"balance": "1,1", "global_batch": None, "batch_per_rank": 8},
            "balance-by-rank",
            {"balance": "1,1"},
        ),
        ({"balance": "fast"}, "wrong-type", {"name": "balance", "value": "fast"}),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    options: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        loader(Numbers(32), 0, 2, **options)


def test_a_stream_is_refused() -> None:
    with refused("numbers-of-stream", name="balance", value="auto", dataset="Stream"):
        Loader(Stream(), global_batch=8, micro_batch=2, rank=0, size=1, balance="auto")
