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
from tests.data.test_window_loader import NO_SIZES
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


def test_what_is_fetched_ahead_is_the_next_window_of_this_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WhenAsked, "ahead", True)
    for rank, samples in ((0, 6), (1, 2)):
        dataset = Counted(32)
        epoch = next(loader(dataset, rank, 2, balance="3,1").epochs(1))
        seen = [len(dataset.fetched) for _ in epoch]
        assert seen == [2 * samples, 3 * samples, 4 * samples, 4 * samples]


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


def test_what_cannot_be_shared_out_is_refused() -> None:
    with refused("balance-of-other-count", given=3, workers=2):
        loader(Numbers(32), 0, 2, balance="2,1,1")
    with refused("balance-by-rank", balance="2,1"):
        loader(Numbers(32), 0, 2, balance="2,1", micro_batch=None)
    with refused("balance-by-rank", balance="1,1"):
        loader(Numbers(32), 0, 2, balance="1,1", **NO_SIZES, batch_per_rank=8)
    with refused("numbers-of-stream", name="balance"):
        loader(Stream(), 0, 2, balance="1")
