"""Shares against every possible one: no other has the slowest rank done earlier."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.shares import in_proportion, in_words, longest, quickest
from lockstep.data.windows import Plan

SECONDS = st.lists(
    st.sampled_from([0.1, 0.11, 0.15, 0.2, 0.3, 0.31, 1.0, 7.0]), min_size=1, max_size=5
)


def every(slots: int, size: int) -> Iterator[tuple[int, ...]]:
    """All ways to share out."""
    if size == 1:
        yield (slots,)
        return
    for first in range(slots + 1):
        yield from ((first, *rest) for rest in every(slots - first, size - 1))


@given(SECONDS, st.integers(1, 12))
def test_nobody_could_be_done_earlier(seconds: list[float], slots: int) -> None:
    found = quickest(seconds, slots)
    assert (len(found), sum(found)) == (len(seconds), slots)
    assert longest(seconds, found) == pytest.approx(
        min(longest(seconds, counts) for counts in every(slots, len(seconds)))
    )


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([0.1, 0.3, 1.0, 1e-5, 123.0]))
def test_ranks_of_one_speed_share_as_always(slots: int, size: int, seconds: float) -> None:
    cut = Plan(samples=slots, global_batch=slots, micro_batch=1).cut(0)
    assert quickest([seconds] * size, slots) == tuple(
        len(cut.share(rank, size)) for rank in range(size)
    )


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60), st.integers(1, 5000))
def test_everything_is_shared_out_whatever_the_speeds(seconds: list[float], slots: int) -> None:
    found = quickest(seconds, slots)
    assert sum(found) == slots
    slowest = longest(seconds, found)
    assert all(
        (count + 1) * each >= slowest * (1 - 1e-9)
        for count, each in zip(found, seconds, strict=True)
    ), "one more here had been better"


def test_pictures() -> None:
    assert quickest([1, 1, 1, 3], 16) == (5, 5, 5, 1)
    assert quickest([1, 1, 1, 1], 16) == (4, 4, 4, 4)
    assert quickest([10, 1, 1], 8) == (0, 4, 4)  # nothing, where one alone would hold up the rest
    assert quickest([1, math.inf, 1], 5) == (3, 0, 2)
    assert in_proportion((2, 1, 1), 16) == (8, 4, 4)
    assert in_proportion((2, 1, 1), 5) == (3, 1, 1)
    assert in_proportion((0, 1), 4) == (0, 4)
    assert in_words((5, 5, 5, 1)) == "5, 5, 5, 1"
    assert in_words((2,) * 4 + (1,) + (3,) * 5) == "2 (ranks 0-3), 1 (rank 4), 3 (ranks 5-9)"
