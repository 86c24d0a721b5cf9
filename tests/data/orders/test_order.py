"""An order is a function of (seed, epoch, position), and tells itself from others."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.data.orders import Order, Sequential, Shuffled


def epoch_of(order: Order, epoch: int) -> list[int]:
    return order.at(epoch, np.arange(order.samples, dtype=np.int64)).tolist()


@pytest.mark.parametrize("samples", [1, 2, 50, 5000])
def test_every_epoch_holds_every_sample_once(samples: int) -> None:
    for order in (Sequential(samples), Shuffled(samples, 3)):
        for epoch in (0, 1, 7):
            assert sorted(epoch_of(order, epoch)) == list(range(samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        (seed, epoch): tuple(epoch_of(Shuffled(50, seed), epoch))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == 16
    assert epoch_of(Sequential(50), 0) == epoch_of(Sequential(50), 1) == list(range(50))


def test_an_order_has_no_memory() -> None:
    order = Shuffled(5000, 1)
    third = epoch_of(order, 3)
    assert epoch_of(order, 0) == epoch_of(Shuffled(5000, 1), 0) != third
    assert order.at(3, np.array([4999, 17], dtype=np.int64)).tolist() == [third[4999], third[17]]
    assert epoch_of(Shuffled(5000, 1), 3) == third


def test_fingerprints_tell_orders_apart() -> None:
    orders: list[Order] = [
        Sequential(50),
        Sequential(51),
        Shuffled(50, 0),
        Shuffled(51, 0),
        Shuffled(50, 1),
    ]
    assert len({order.fingerprint() for order in orders}) == len(orders)
    assert Shuffled(50, 1).fingerprint() == Shuffled(50, 1).fingerprint()
