"""The permutation is one, for every n, can be undone, and looks like chance."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.data.permutation import Permutation
from lockstep.runtime.randomness import derive
from tests.data.chance import places, usual
from tests.refused import refused

AROUND_POWERS = sorted({2**k + d for k in range(1, 19) for d in (-1, 0, 1)} - {0})
LARGE = 5003  # just beyond what is ordered by hashes


def whole(n: int, key: int) -> NDArray[np.int64]:
    return Permutation(n, key)(np.arange(n, dtype=np.int64))


def test_small_sizes_are_permuted_completely() -> None:
    for n in range(1, 200):
        for key in range(5):
            assert np.array_equal(np.sort(whole(n, key)), np.arange(n)), (n, key)


@pytest.mark.parametrize(
    "n", [*AROUND_POWERS, 4096, 4097, 65 * 65, 65 * 65 + 1, 66 * 65, 66 * 65 + 1]
)
def test_sizes_around_powers_and_squares_are_permuted_completely(n: int) -> None:
    permutation = Permutation(n, derive(3, n))
    elements = permutation(np.arange(n, dtype=np.int64))
    assert np.array_equal(np.sort(elements), np.arange(n))
    assert np.array_equal(permutation.inverse(elements), np.arange(n))


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_any_position_of_any_size_comes_back(n: int, key: int, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    positions = np.array([*drawn, 0, n - 1], dtype=np.int64)
    permutation = Permutation(n, key)
    elements = permutation(positions)
    assert elements.dtype == np.int64
    assert elements.min() >= 0
    assert elements.max() < n
    assert len(set(elements.tolist())) == len(set(positions.tolist()))
    assert np.array_equal(permutation.inverse(elements), positions)
    assert np.array_equal(permutation(permutation.inverse(positions)), positions)


@given(st.integers(4097, 2**62))
@example(2**62)
@example(2**62 - 1)
@example(4097)
def test_the_table_is_hardly_larger_than_n(n: int) -> None:
    rows, columns = map(int, Permutation(n, 0)._sides)
    assert n <= rows * columns <= n + math.isqrt(n) + 1
    assert max(rows, columns) <= 2**31


def test_an_order_is_the_same_on_every_machine() -> None:
    # Recorded once: a change of these numbers changes every training that anybody has recorded.
    first = np.arange(6, dtype=np.int64)
    assert Permutation(10, 1)(first).tolist() == [2, 0, 4, 1, 6, 8]
    assert Permutation(10**12, 1)(first).tolist() == [
        462305448563,
        559133017165,
        487021652808,
        778043258790,
        124020009125,
        517686981202,
    ]


def test_shapes_are_kept_and_the_positions_left_alone() -> None:
    permutation = Permutation(LARGE, 2)
    positions = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
    before = positions.copy()
    assert np.array_equal(
        permutation(positions), permutation(np.arange(24, dtype=np.int64)).reshape(2, 3, 4)
    )
    assert np.array_equal(positions, before)
    assert permutation(np.array([], dtype=np.int64)).shape == (0,)
    assert permutation(np.array(5, dtype=np.int64)).shape == ()
    assert (
        Permutation(10, 2)(np.arange(10, dtype=np.int64)[::-2]).tolist()
        == whole(10, 2)[::-2].tolist()
    )


def test_what_is_returned_can_be_changed_without_changing_the_order() -> None:
    permutation = Permutation(100, 4)
    first = permutation(np.arange(100, dtype=np.int64))
    kept = first.copy()
    first[:] = 0
    assert np.array_equal(permutation(np.arange(100, dtype=np.int64)), kept)


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_sizes_out_of_range_are_refused(n: int) -> None:
    with refused("wrong-value", name="n", value=n):
        Permutation(n, 0)


@pytest.mark.parametrize("n", [100, LARGE])
def test_positions_out_of_range_are_refused(n: int) -> None:
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


def chi_square_is_usual(values: NDArray[np.int64], n: int, bins: int) -> bool:
    counts = np.histogram(values, bins=np.linspace(0, n, bins + 1))[0]
    share = np.diff(np.ceil(np.linspace(0, n, bins + 1))) / n
    expected = share * values.size
    return float(((counts - expected) ** 2 / expected).sum()) < bins - 1 + 5 * math.sqrt(
        2 * (bins - 1)
    )


def test_every_position_gets_every_element_equally_often(many: NDArray[np.int64]) -> None:
    n = many.shape[1]
    for position in (0, 1, n // 3, n // 2, n - 2, n - 1):
        assert chi_square_is_usual(many[:, position], n, 40), position


def test_neighbours_and_far_positions_are_unrelated(many: NDArray[np.int64]) -> None:
    n = many.shape[1]
    scaled = (many - (n - 1) / 2) / np.sqrt((n * n - 1) / 12)
    for lag in (1, 2, 3, 8, 64, math.isqrt(n) + 1, math.isqrt(n), n // 2):
        correlation = float((scaled[:, lag:] * scaled[:, :-lag]).mean())
        assert abs(correlation + 1 / (n - 1)) < 5 / math.sqrt(KEYS * (n - lag)), lag
        differences = (many[:, lag] - many[:, 0]) % n
        assert chi_square_is_usual(differences - (differences > 0), n - 1, 40), lag


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


# -- beside numpy's permutations -----------------------------------------------------------------

COMPARED = 200


def cycles(row: list[int]) -> tuple[int, int]:
    """(how many, the longest)."""
    seen = bytearray(len(row))
    count = longest = 0
    for start in range(len(row)):
        if seen[start]:
            continue
        count, length, place = count + 1, 0, start
        while not seen[place]:
            seen[place] = 1
            place, length = row[place], length + 1
        longest = max(longest, length)
    return count, longest


def longest_increasing(row: list[int]) -> int:
    """By patience sorting."""
    tops: list[int] = []
    for value in row:
        place = bisect.bisect_left(tops, value)
        tops[place : place + 1] = [value]
    return len(tops)


def inversions(row: NDArray[np.int64]) -> int:
    """Pairs in the wrong order, by merging halves."""
    count, width = 0, 1
    blocks = row.copy()
    while width < blocks.size:
        for first in range(0, blocks.size, 2 * width):
            left, right = blocks[first : first + width], blocks[first + width : first + 2 * width]
            count += left.size * right.size - int(np.searchsorted(left, right).sum())
            blocks[first : first + 2 * width] = np.sort(blocks[first : first + 2 * width])
        width *= 2
    return count


STATISTICS: dict[str, Callable[[NDArray[np.int64]], float]] = {
    "cycles": lambda row: cycles(row.tolist())[0],
    "longest cycle": lambda row: cycles(row.tolist())[1],
    "longest increasing": lambda row: longest_increasing(row.tolist()),
    "displacement": lambda row: float(np.abs(row - np.arange(row.size)).sum()),
    "steps between neighbours": lambda row: float(np.abs(np.diff(row)).sum()),
    "ascents": lambda row: float((np.diff(row) > 0).sum()),
    "records": lambda row: np.unique(np.maximum.accumulate(row)).size,
}


def distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Kolmogorov and Smirnov's: between the two samples' distribution functions."""
    values = np.union1d(one, other)
    shares = [
        np.searchsorted(np.sort(sample), values, side="right") / sample.size
        for sample in (one, other)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize("name", STATISTICS)
def test_shapes_are_distributed_as_those_of_true_random_permutations(
    many: NDArray[np.int64], name: str
) -> None:
    true = np.random.default_rng(1).permuted(
        np.broadcast_to(np.arange(many.shape[1]), (COMPARED, many.shape[1])), axis=1
    )
    ours, theirs = (
        np.array([STATISTICS[name](row) for row in rows[:COMPARED]]) for rows in (many, true)
    )
    assert distance(ours, theirs) < 2.7 * math.sqrt(2 / COMPARED)  # by chance once in a million


@pytest.mark.parametrize("n", [100, LARGE])
def test_as_many_pairs_are_in_the_wrong_order_as_by_chance(n: int) -> None:
    rows = 12
    found = np.array([inversions(whole(n, derive(1, epoch))) for epoch in range(rows)])
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 72)
    assert abs(found.mean() - n * (n - 1) / 4) < 5 * deviation / math.sqrt(rows)
    assert 0.5 < found.std() / deviation < 1.5


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_permutation_of_a_few_comes_equally_often(n: int) -> None:
    draws = 50 * math.factorial(n)
    counts = Counter(tuple(whole(n, derive(2, epoch)).tolist()) for epoch in range(draws))
    assert len(counts) == math.factorial(n)
    assert usual(list(counts.values()), 50)


# -- far out -------------------------------------------------------------------------------------

FAR = 2**62


def test_the_largest_is_walked_in_any_pieces() -> None:
    permutation = Permutation(FAR, 9)
    positions = np.random.default_rng(0).integers(0, FAR, 20_000)
    elements = permutation(positions)
    assert np.array_equal(permutation.inverse(elements), positions)
    assert np.array_equal(permutation(permutation.inverse(positions)), positions)
    assert np.array_equal(
        np.concatenate([permutation(piece) for piece in np.array_split(positions[::-1], 7)])[::-1],
        elements,
    )
    assert not np.array_equal(Permutation(FAR, 10)(positions), elements)


@pytest.mark.parametrize("n", [FAR, FAR - 1, 2**61 + 1, 3 * 10**18])
def test_neighbours_anywhere_are_spread_over_all_of_a_huge_size(n: int) -> None:
    permutation = Permutation(n, 9)
    for first in (0, n // 2, n - 20_000):
        found = permutation(np.arange(first, first + 20_000, dtype=np.int64))
        assert np.unique(found).size == found.size
        assert usual(places(found // (n // 64 + 1), 64), 20_000 / 64), first
        assert usual(places(found % 64, 64), 20_000 / 64), first
        steps = np.diff(found.astype(object)) % n
        assert usual(places((steps // (n // 64 + 1)).astype(np.int64), 64), 19_999 / 64), first


def test_the_largest_is_the_same_on_every_machine() -> None:
    # Recorded once: a change of these numbers changes every training that anybody has recorded.
    ends = np.array([0, 1, FAR // 2, FAR - 2, FAR - 1], dtype=np.int64)
    assert Permutation(FAR, 1)(ends).tolist() == [
        2976377919675281027,
        1465182063342878308,
        4423519903908042182,
        226210359267654453,
        3114392060264311469,
    ]
