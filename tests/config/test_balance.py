"""What may be asked for about ranks of different speed, and what is said of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.balance import Balance
from lockstep.config.parallelism import Parallelism
from tests.refused import refused


def test_text_and_numbers() -> None:
    for text in ("2,1,1", "0.5,0,3"):
        assert str(Balance.of(text)) == text
    assert Balance.of((2, 1, 1)) == Balance.of([2.0, 1.0, 1.0]) == Balance.of("2, 1,1")


@pytest.mark.parametrize(
    ("given", "code", "values"),
    [
        ("", "wrong-value", {"name": "balance", "value": ""}),
        ("auto", "wrong-value", {"value": "auto"}),
        ("2;1", "wrong-value", {"value": "2;1"}),
        ("2,,1", "wrong-value", {"value": "2,,1"}),
        (5, "wrong-value", {"value": 5}),
        (["2", None], "wrong-value", {"name": "share", "value": "2"}),
        ("2,-1", "wrong-value", {"value": -1.0}),
        ("inf,1", "wrong-value", {"value": math.inf}),
        ("nan,1", "wrong-value", {"name": "share"}),
        ((True, 1), "wrong-value", {"value": True}),
        ("0,0", "nobody-has-work", {"balance": "0,0"}),
        ((), "nobody-has-work", {"balance": ""}),
    ],
)
def test_what_is_no_balance_is_refused(given: Any, code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        Balance.of(given)


def test_what_it_does_not_go_with_is_refused() -> None:
    for text in ("2,1,1", "1"):
        with refused("balance-of-other-count", balance=text, workers=2):
            Balance.of(text).check(Parallelism(), 2)
    two = Balance.of("2,1")
    with refused("balance-with-server", balance="2,1"):
        two.check(Parallelism(update="server"), 2)
    for mesh in ("tensor=2", "data=2,shard=2"):
        with refused("balance-with-mesh", mesh=mesh):
            two.check(Parallelism(mesh=mesh), 2)
    for method in (
        Parallelism(exact=True),
        Parallelism(update="sharded"),
        Parallelism(compress="bf16"),
        Parallelism(mesh="data=2"),
        Parallelism(sync_every=4),
    ):
        two.check(method, 2)


def test_equals_share_evenly_and_the_first_have_more() -> None:
    assert Balance((1, 1, 1)).shares(4) == (2, 1, 1)
    assert Balance((3, 3, 3, 1)).shares(16) == (5, 5, 5, 1)


def longest(weights: Sequence[float], counts: Sequence[int]) -> float:
    """The time of the slowest rank, if the weights are speeds."""
    return max(count / weight for weight, count in zip(weights, counts, strict=True) if count)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any), st.integers(1, 8))
def test_no_other_shares_end_a_step_earlier(weights: list[int], slots: int) -> None:
    shares = Balance(tuple(weights)).shares(slots)
    assert sum(shares) == slots
    assert not any(count for weight, count in zip(weights, shares, strict=True) if not weight), (
        "weight 0 gets none"
    )
    others = product(*(range(slots + 1) if weight else (0,) for weight in weights))
    best = min(longest(weights, counts) for counts in others if sum(counts) == slots)
    assert longest(weights, shares) == pytest.approx(best)
