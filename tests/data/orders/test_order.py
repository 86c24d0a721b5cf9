"""What holds for every order of positions: it is a function of (seed, epoch, position), the same on
every machine, and its fingerprint tells it from others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lockstep.data.orders import (
    BlockShuffled,
    ByLength,
    FromBatches,
    FromSampler,
    Mixture,
    Order,
    Sequential,
    Shuffled,
    Weighted,
)
from tests.data.orders.samplers import Drawing

WEIGHTS = [5.0, 1.0, 1.0, 3.0, 2.0, 0.0]
LENGTHS = [3, 9, 4, 8, 3, 9, 4, 3, 9]

BY_SEED: dict[str, Callable[[int], Order]] = {
    "shuffled by hashes": lambda seed: Shuffled(50, seed),
    "shuffled by a network": lambda seed: Shuffled(5000, seed),
    "blocks": lambda seed: BlockShuffled(50, 7, seed),
    "weighted": lambda seed: Weighted(np.arange(1.0, 101.0), seed=seed),
    "weighted without replacement": lambda seed: Weighted(
        np.arange(1.0, 101.0), replacement=False, seed=seed
    ),
    "mixture": lambda seed: Mixture([10, 3, 40], [0.5, 0.2, 0.3], samples=50, seed=seed),
    "sampler": lambda seed: FromSampler(Drawing(50, "torch"), seed=seed),
}


def epoch_of(order: Any, epoch: int) -> list[Any]:
    """An epoch's samples, or its micro-batches where the order makes them."""
    if hasattr(order, "batch"):
        return [order.batch(epoch, number).tolist() for number in range(order.count(epoch))]
    return order.at(epoch, np.arange(order.samples, dtype=np.int64)).tolist()


@pytest.mark.parametrize("kind", BY_SEED)
def test_an_order_is_a_function_without_memory(kind: str) -> None:
    """Positions are asked for alone, in any shape and after any epoch, and what is returned may be
    changed.
    """
    order = BY_SEED[kind](1)
    epochs = {epoch: np.array(epoch_of(order, epoch)) for epoch in (3, 0)}
    asked = np.random.default_rng(0).integers(0, order.samples, 12)
    one, none = asked[:1].reshape(()), asked[:0]
    for positions in (asked, asked.reshape(2, 6), asked.reshape(3, 2, 2), asked[::-2], one, none):
        for epoch, samples in epochs.items():
            before = positions.copy()
            returned = np.asarray(order.at(epoch, positions))
            assert np.array_equal(returned, samples[positions])
            assert returned.shape == positions.shape
            assert np.array_equal(positions, before)
    order.at(3, asked)[:] = 0
    assert np.array_equal(order.at(3, asked), epochs[3][asked])
    assert epoch_of(BY_SEED[kind](1), 3) == epochs[3].tolist()


@pytest.mark.parametrize("kind", BY_SEED)
def test_epochs_and_seeds_have_orders_of_their_own(kind: str) -> None:
    orders = {
        tuple(epoch_of(BY_SEED[kind](seed), epoch)) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9


@pytest.mark.parametrize(
    ("order", "epochs"),
    [
        (Sequential(4), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (
            BlockShuffled(10, 4, 1),
            [[8, 9, 7, 6, 5, 4, 1, 0, 2, 3], [8, 9, 1, 3, 2, 0, 5, 7, 4, 6]],
        ),
        (Weighted(WEIGHTS, samples=10, seed=1), [[0, 3, 3, 3, 0, 1, 3, 3, 3, 4]]),
        (Weighted(WEIGHTS, replacement=False, seed=1), [[3, 0, 2, 1, 4], [0, 4, 3, 2, 1]]),
        (
            Mixture([4, 2, 3], [2, 1, 1], seed=1),
            [[0, 3, 4, 6, 2, 1, 5, 7, 5], [8, 3, 1, 7, 0, 2, 4, 4, 8]],
        ),
        (ByLength(LENGTHS, 18, boundaries=[4, 9], seed=1), [[[3, 1], [8, 5], [2, 7, 0, 4], [6]]]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_order_is_the_same_on_every_machine(order: Any, epochs: list[Any]) -> None:
    # Recorded once: a change of these numbers changes every training that anybody has recorded.
    assert [epoch_of(order, epoch) for epoch in range(len(epochs))] == epochs


def test_fingerprints_tell_orders_apart() -> None:
    orders: list[Callable[[], Any]] = [
        lambda: Sequential(50),
        lambda: Sequential(51),
        lambda: Shuffled(50, 0),
        lambda: Shuffled(51, 0),
        lambda: Shuffled(50, 1),
        lambda: BlockShuffled(50, 7, 0),
        lambda: BlockShuffled(51, 7, 0),
        lambda: BlockShuffled(50, 8, 0),
        lambda: BlockShuffled(50, 7, 1),
        lambda: Weighted(WEIGHTS, seed=0),
        lambda: Weighted(WEIGHTS, seed=1),
        lambda: Weighted(WEIGHTS, samples=4, seed=0),
        lambda: Weighted(WEIGHTS, samples=4, replacement=False, seed=0),
        lambda: Weighted([*WEIGHTS[:-1], 0.25], seed=0),
        lambda: Mixture([10, 3], [1, 5], seed=0),
        lambda: Mixture([10, 3], [1, 5], seed=1),
        lambda: Mixture([10, 3], [1, 6], seed=0),
        lambda: Mixture([3, 10], [1, 5], seed=0),
        lambda: Mixture([10, 3], [1, 5], samples=12, seed=0),
        lambda: ByLength(LENGTHS, 18, seed=0),
        lambda: ByLength(LENGTHS, 18, seed=1),
        lambda: ByLength(LENGTHS, 19, seed=0),
        lambda: ByLength(LENGTHS[::-1], 18, seed=0),
        lambda: ByLength([*LENGTHS[:-1], 8], 18, seed=0),
        lambda: ByLength(LENGTHS, 18, boundaries=[4, 9], seed=0),
        lambda: FromSampler(Drawing(20, "torch"), seed=0),
        lambda: FromSampler(Drawing(20, "torch"), seed=1),
        lambda: FromSampler([1, 2]),
        lambda: FromSampler([2, 1]),
        lambda: FromBatches([[0, 1], [2]]),
        lambda: FromBatches([[0], [1, 2]]),
        lambda: FromBatches([[0, 1, 2]]),
        lambda: FromBatches([[0, 1], [3]]),
        lambda: FromBatches([[0, 1], [2]], seed=1),
    ]
    fingerprints = [make().fingerprint() for make in orders]
    assert len(set(fingerprints)) == len(orders)
    assert [make().fingerprint() for make in orders] == fingerprints
