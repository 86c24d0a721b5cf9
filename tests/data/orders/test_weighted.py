"""Weighted draws: how often, how early, and never what has weight 0; against the probabilities
worked out by hand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.data.orders import Weighted
from tests.data.chance import places, usual
from tests.refused import refused

WEIGHTS = [1.0, 0.0, 4.0, 2.0, 0.5]
SHARES = np.array(WEIGHTS) / sum(WEIGHTS)
POSITIVE = np.flatnonzero(SHARES)
EPOCHS = 4000


def epochs_of(order: Weighted, epochs: int) -> NDArray[np.int64]:
    """An epoch a row."""
    return np.stack(
        [order.at(epoch, np.arange(order.samples, dtype=np.int64)) for epoch in range(epochs)]
    )


def test_at_every_position_samples_come_in_proportion() -> None:
    found = epochs_of(Weighted(WEIGHTS, samples=6, seed=3), EPOCHS)
    for position in range(6):
        counts = places(found[:, position], 5)
        assert counts[1] == 0
        assert usual(counts[POSITIVE], EPOCHS * SHARES[POSITIVE]), position


def test_a_draw_says_nothing_about_the_next_one_nor_about_the_next_epochs() -> None:
    found = epochs_of(Weighted(WEIGHTS, samples=200, seed=4), 101)
    together = np.outer(SHARES, SHARES)[np.ix_(POSITIVE, POSITIVE)]
    for one, other in ((found[:, :-1], found[:, 1:]), (found[:-1], found[1:])):
        pairs = places(one * 5 + other, 25).reshape(5, 5)[np.ix_(POSITIVE, POSITIVE)]
        assert usual(pairs, one.size * together)


def test_without_replacement_every_sample_of_positive_weight_comes_once() -> None:
    order = Weighted([*range(50)], replacement=False, seed=0)
    assert order.samples == 49
    for row in epochs_of(order, 5).tolist():
        assert sorted(row) == list(range(1, 50))


def test_heavy_samples_come_earlier() -> None:
    """Sample j comes before i with probability weight j / (weight i + weight j): that sum over j
    is i's place on average.
    """
    weights = np.arange(1.0, 41.0)
    found = epochs_of(Weighted(weights, replacement=False, seed=1), 1000)
    place = np.argsort(found, axis=1)
    before = weights[None, :] / (weights[:, None] + weights[None, :])
    np.fill_diagonal(before, 0)
    assert (
        np.abs(place.mean(axis=0) - before.sum(axis=1)) < 5 * place.std(axis=0) / math.sqrt(1000)
    ).all()


def test_without_replacement_an_epoch_may_be_a_part() -> None:
    whole, part = (Weighted(WEIGHTS, samples=n, replacement=False, seed=2) for n in (4, 3))
    assert np.array_equal(epochs_of(whole, 5)[:, :3], epochs_of(part, 5))


@pytest.mark.parametrize("replacement", [True, False])
def test_a_weight_is_a_proportion(replacement: bool) -> None:
    one, other = (
        Weighted(np.array(WEIGHTS) * unit, replacement=replacement, samples=4, seed=1)
        for unit in (1.0, 2.0**900)
    )
    assert np.array_equal(epochs_of(one, 9), epochs_of(other, 9))
    assert one.fingerprint() == other.fingerprint()


def test_what_cannot_be_drawn_is_refused() -> None:
    with refused("wrong-value", name="weights[1]", value=-1.0):
        Weighted([1.0, -1.0], seed=0)
    with refused("weights-all-zero", count=2):
        Weighted([0.0, 0.0], replacement=False, seed=0)
    with refused("wrong-value", name="samples", value=0):
        Weighted(WEIGHTS, samples=0, seed=0)
    with refused("more-draws-than-weights", samples=5, positive=4):
        Weighted(WEIGHTS, samples=5, replacement=False, seed=0)
