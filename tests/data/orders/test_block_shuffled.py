"""A shuffle in blocks: neighbours stay together, in an order of their own, and the short last
block comes anywhere.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.orders import BlockShuffled
from tests.data.chance import places, usual
from tests.refused import refused

EPOCHS = 1500


def epoch_of(order: BlockShuffled, epoch: int) -> list[int]:
    return order.at(epoch, np.arange(order.samples, dtype=np.int64)).tolist()


def blocks_of(order: BlockShuffled, epoch: int) -> list[tuple[int, list[int]]]:
    """(block's number, its samples less its first), as they come."""
    runs = groupby(epoch_of(order, epoch), key=lambda sample: sample // order.block)
    return [
        (number, [sample - number * order.block for sample in samples]) for number, samples in runs
    ]


BLOCKS = st.integers(1, 40) | st.just(10**9)


@given(st.integers(1, 200), BLOCKS, st.integers(0, 2**63), st.integers(0, 5))
def test_each_block_comes_once_and_whole(samples: int, block: int, seed: int, epoch: int) -> None:
    found = blocks_of(BlockShuffled(samples, block, seed), epoch)
    count = -(-samples // block)
    if block > 1:
        assert len(found) == count  # as many runs as blocks: none is interrupted
    assert sorted(number for number, _ in found) == list(range(count))
    for number, inside in found:
        assert sorted(inside) == list(range(min(block, samples - number * block)))


def test_blocks_their_samples_epochs_and_seeds_have_orders_of_their_own() -> None:
    every = {
        (seed, epoch): blocks_of(BlockShuffled(1000, 50, seed), epoch)
        for seed in range(2)
        for epoch in range(2)
    }
    assert len({tuple(number for number, _ in found) for found in every.values()}) == 4
    assert len({tuple(inside) for found in every.values() for _, inside in found}) == 4 * 20


def test_every_block_comes_equally_often_at_every_place_and_the_short_one_too() -> None:
    order = BlockShuffled(14, 3, 0)  # blocks of 3 3 3 3 2
    numbers = np.array(
        [[number for number, _ in blocks_of(order, epoch)] for epoch in range(EPOCHS)]
    )
    for place in range(5):
        assert usual(places(numbers[:, place], 5), EPOCHS / 5), place
    pairs = places(numbers[:, :-1] * 5 + numbers[:, 1:], 25)
    assert usual(pairs[pairs > 0], 4 * EPOCHS / 20)


def test_nothing_is_stored_and_the_far_end_is_reached_at_once() -> None:
    samples, block = 10**15 + 17, 1000
    order = BlockShuffled(samples, block, 0)
    near = order.at(0, np.arange(5 * block, dtype=np.int64))
    far = order.at(0, np.arange(samples - 5 * block, samples, dtype=np.int64))
    for found in (near, far):
        assert found.min() >= 0
        assert found.max() < samples
        assert len(set(found.tolist())) == 5 * block
        assert len(set((found // block).tolist())) in (5, 6)
    assert not set(near.tolist()) & set(far.tolist())


def test_sizes_that_cannot_be_are_refused() -> None:
    with refused("wrong-value", name="samples", value=0):
        BlockShuffled(0, 4, 0)
    for block in (0, 1.5):
        with refused("wrong-value", name="block", value=block):
            BlockShuffled(4, block, 0)  # type: ignore[arg-type]
