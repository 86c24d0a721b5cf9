"""A mixture: the shares hold in every stretch, and no sample of a component comes again before
all of it have come.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.data.orders import Mixture
from lockstep.data.orders.mixture import period_counts
from tests.data.chance import places, usual
from tests.refused import refused


def line_of(order: Mixture, epochs: int) -> NDArray[np.int64]:
    """All positions of so many epochs, one after the other."""
    return np.concatenate(
        [order.at(epoch, np.arange(order.samples, dtype=np.int64)) for epoch in range(epochs)]
    )


def components(order: Mixture, samples: NDArray[np.int64], lengths: list[int]) -> NDArray[np.int64]:
    return np.searchsorted(np.cumsum(lengths), samples, side="right")


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([2, 1, 1], [2, 1, 1]),
        ([0.7, 0.3], [7, 3]),
        ([1, 0, 1], [1, 0, 1]),
        ([5], [1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([math.pi, 1], [22, 7]),  # 22/7 is right to a thousandth
        ([1, 4095], [1, 4091]),  # so is this
    ],
)
def test_a_period_is_the_shortest_that_is_right(weights: list[float], counts: list[int]) -> None:
    assert Mixture([9] * len(weights), weights, seed=0).counts.tolist() == counts


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=12))
def test_a_period_is_short_enough_and_close(weights: list[float]) -> None:
    counts = period_counts(np.array(weights))
    shares = np.array(weights) / sum(weights)
    assert 1 <= counts.sum() <= 4096
    assert counts.min() >= 1
    exact = (np.abs(counts / counts.sum() - shares) <= 1.001e-3 * shares).all()
    assert exact or (counts.sum() == 4096 and np.abs(counts - 4096 * shares).max() < 1)


def test_every_period_has_the_shares_exactly_wherever_an_epoch_ends() -> None:
    lengths = [10, 3, 40]
    order = Mixture(lengths, [2, 1, 1], samples=13, seed=0)
    found = components(order, line_of(order, 40), lengths).reshape(-1, 4)
    assert {tuple(sorted(period)) for period in found.tolist()} == {(0, 0, 1, 2)}


def test_within_a_period_every_arrangement_comes_equally_often() -> None:
    order = Mixture([1, 1, 1], [2, 1, 1], samples=4 * 1200, seed=3)
    periods = line_of(order, 1).reshape(-1, 4)
    counts = places(periods @ np.array([27, 9, 3, 1]), 81)
    assert np.count_nonzero(counts) == 12  # 4! / 2!
    assert usual(counts[counts > 0], 1200 / 12)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=4).filter(
        lambda given: any(w for _, w in given)
    ),
    st.integers(1, 30),
    st.integers(0, 2**63),
)
def test_each_component_is_walked_in_permutations_through_the_epochs(
    given: list[tuple[int, int]], samples: int, seed: int
) -> None:
    lengths, weights = [list(column) for column in zip(*given, strict=True)]
    order = Mixture(lengths, weights, samples=samples, seed=seed)
    line = line_of(order, 4)
    which = components(order, line, lengths)
    for number, length in enumerate(lengths):
        own = (line[which == number] - sum(lengths[:number])).tolist()
        assert bool(own) <= (weights[number] > 0)
        for begin in range(0, len(own), length):
            cycle = own[begin : begin + length]
            assert len(set(cycle)) == len(cycle)
            assert set(cycle) <= set(range(length))
            if len(cycle) == length:
                assert set(cycle) == set(range(length))


def test_cycles_components_and_seeds_have_orders_of_their_own() -> None:
    orders = [Mixture([30, 30], [1, 1], samples=60, seed=seed) for seed in range(2)]
    walks = [
        order.at(epoch, np.arange(60, dtype=np.int64)) for order in orders for epoch in range(3)
    ]
    assert (
        len({tuple((walk[walk // 30 == c] % 30).tolist()) for walk in walks for c in range(2)})
        == 12
    )


def test_many_periods_asked_for_at_once_are_those_asked_for_one_by_one() -> None:
    # more than a million positions are drawn in parts
    order = Mixture([1000, 10**6], [1, 4095], samples=300 * 4096, seed=1)
    asked = np.arange(0, order.samples, 4096, dtype=np.int64) + 5
    assert np.array_equal(
        order.at(0, asked),
        np.concatenate([order.at(0, asked[i : i + 1]) for i in range(asked.size)]),
    )


def test_the_far_end_is_reached_at_once() -> None:
    lengths = [10**14, 10**9]
    order = Mixture(lengths, [3, 1], seed=0)
    far = order.at(7, np.arange(order.samples - 4000, order.samples, dtype=np.int64))
    assert abs(places(components(order, far, lengths), 2)[1] - 1000) <= 2
    assert len(set(far.tolist())) == 4000


def test_what_cannot_be_mixed_is_refused() -> None:
    with refused("mixture-lists-differ", lengths=2, weights=1):
        Mixture([4, 4], [1.0], seed=0)
    with refused("wrong-value", name="weights[1]", value=-1.0):
        Mixture([4, 4], [1.0, -1.0], seed=0)
    with refused("component-empty", number=1):
        Mixture([4, 0], [1, 1], seed=0)
    with refused("wrong-value", name="lengths[1]", value=-1):
        Mixture([4, -1], [1, 0], seed=0)
    with refused("weight-too-small", number=0, least=4096):
        Mixture([4, 4], [1, 4096], seed=0)
    with refused("wrong-value", name="samples", value=0):
        Mixture([4, 4], [1, 1], samples=0, seed=0)
