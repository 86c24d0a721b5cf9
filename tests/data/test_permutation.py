"""The permutation is one, for every n, can be undone, and looks like chance."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.data.permutation import Permutation
from lockstep.runtime.randomness import derive
from tests.data.chance import places, usual
from tests.refused import refused

LARGE = 5003  # just beyond what is ordered by hashes
FAR = 2**62  # the largest


def whole(n: int, key: int) -> NDArray[np.int64]:
    return Permutation(n, key)(np.arange(n, dtype=np.int64))


def test_sizes_are_permuted_completely() -> None:
    """All small ones, and those around powers of two and squares."""
    around_powers = {2**power + more for power in range(8, 19) for more in (-1, 0, 1)}
    around_squares = {65 * 65, 65 * 65 + 1, 66 * 65, 66 * 65 + 1}
    for n in [*range(1, 200), *around_powers, *around_squares]:
        for key in (0, derive(3, n)):
            permutation = Permutation(n, key)
            elements = permutation(np.arange(n, dtype=np.int64))
            assert np.array_equal(np.sort(elements), np.arange(n)), (n, key)
            assert np.array_equal(permutation.inverse(elements), np.arange(n)), (n, key)


@given(st.integers(1, FAR) | st.just(FAR), st.integers(0, 2**64 - 1), st.data())
def test_any_position_of_any_size_comes_back(n: int, key: int, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    positions = np.array([*drawn, 0, n - 1], dtype=np.int64)
    permutation = Permutation(n, key)
    elements = permutation(positions)
    assert permutation(positions[:1].reshape(())) == elements[0]
    assert elements.dtype == np.int64
    assert elements.min() >= 0
    assert elements.max() < n
    assert len(set(elements.tolist())) == len(set(positions.tolist()))
    assert np.array_equal(permutation.inverse(elements), positions)
    assert np.array_equal(permutation(permutation.inverse(positions)), positions)


def test_an_order_is_the_same_on_every_machine() -> None:
    # Recorded once: a change of these numbers changes every training that anybody has recorded.
    first = np.arange(6, dtype=np.int64)
    assert Permutation(10, 1)(first).tolist() == [2, 0, 4, 1, 6, 8]
    large = [462305448563, 559133017165, 487021652808, 778043258790]
    assert Permutation(10**12, 1)(first[:4]).tolist() == large
    ends = np.array([0, FAR // 2, FAR - 1], dtype=np.int64)
    largest = [2976377919675281027, 4423519903908042182, 3114392060264311469]
    assert Permutation(FAR, 1)(ends).tolist() == largest


def test_sizes_and_positions_out_of_range_are_refused() -> None:
    for n in (0, -1, FAR + 1):
        with refused("wrong-value", name="n", value=n):
            Permutation(n, 0)
    for n in (100, LARGE):
        for method in (Permutation(n, 0), Permutation(n, 0).inverse):
            with refused("outside-order", value=f"0..{n}", count=n):
                method(np.array([0, n], dtype=np.int64))
            with refused("outside-order", value="-1..-1", count=n):
                method(np.array([-1], dtype=np.int64))


# -- looks like chance: every bound is five standard deviations of a uniformly random permutation

KEYS = 1500


@pytest.fixture(scope="module", params=[97, LARGE])
def many(request: pytest.FixtureRequest) -> NDArray[np.int64]:
    """One permutation a row, of the keys that the first epochs of one seed have."""
    return np.stack([whole(request.param, derive(0, 5, epoch)) for epoch in range(KEYS)])


def spread(values: NDArray[np.int64], n: int) -> bool:
    """Whether as many of the values are in each fortieth of 0 .. n - 1."""
    edges = np.ceil(np.linspace(0, n, 41)).astype(np.int64)
    counts = np.histogram(values, bins=edges - 0.5)[0]
    return usual(counts, np.diff(edges) / n * values.size)


def test_every_position_gets_every_element_equally_often(many: NDArray[np.int64]) -> None:
    n = many.shape[1]
    for position in (0, 1, n // 3, n // 2, n - 2, n - 1):
        assert spread(many[:, position], n), position


def test_neighbours_and_far_positions_are_unrelated(many: NDArray[np.int64]) -> None:
    n = many.shape[1]
    scaled = (many - (n - 1) / 2) / np.sqrt((n * n - 1) / 12)
    for lag in (1, 2, 3, 8, 64, math.isqrt(n) + 1, math.isqrt(n), n // 2):
        correlation = float((scaled[:, lag:] * scaled[:, :-lag]).mean())
        assert abs(correlation + 1 / (n - 1)) < 5 / math.sqrt(KEYS * (n - lag)), lag
        differences = (many[:, lag] - many[:, 0]) % n
        assert spread(differences - (differences > 0), n - 1), lag


def test_rare_events_are_as_rare_as_by_chance(many: NDArray[np.int64]) -> None:
    n = many.shape[1]
    bound = 5 / math.sqrt(KEYS)  # each of these counts is nearly Poisson
    fixed = (many == np.arange(n)).sum(axis=1)
    assert abs(fixed.mean() - 1) < bound
    assert abs(fixed.var() - 1) < 5 * math.sqrt(3 / KEYS)
    ascents = (np.diff(many, axis=1) == 1).sum(axis=1)
    assert abs(ascents.mean() - (n - 1) / n) < bound
    same_as_last_epoch = (many[1:] == many[:-1]).sum(axis=1)
    assert abs(same_as_last_epoch.mean() - 1) < bound


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_permutation_of_a_few_comes_equally_often(n: int) -> None:
    draws = 50 * math.factorial(n)
    counts = Counter(tuple(whole(n, derive(2, epoch)).tolist()) for epoch in range(draws))
    assert len(counts) == math.factorial(n)
    assert usual(list(counts.values()), 50)


@pytest.mark.parametrize("n", [FAR, 3 * 10**18])
def test_neighbours_anywhere_are_spread_over_all_of_a_huge_size(n: int) -> None:
    permutation = Permutation(n, 9)
    for first in (0, n // 2, n - 20_000):
        found = permutation(np.arange(first, first + 20_000, dtype=np.int64))
        assert np.unique(found).size == found.size
        assert usual(places(found // (n // 64 + 1), 64), 20_000 / 64), first
        assert usual(places(found % 64, 64), 20_000 / 64), first
        steps = np.diff(found.astype(object)) % n
        assert usual(places((steps // (n // 64 + 1)).astype(np.int64), 64), 19_999 / 64), first
