"""Micro-batches by length: within the budget, of similar lengths, each sample once, and alike in
cost.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.data.orders import ByLength
from tests.refused import refused


def epoch_of(order: ByLength, epoch: int) -> list[NDArray[np.int64]]:
    return [order.batch(epoch, number) for number in range(order.count(epoch))]


def cost(batch: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """Tokens after padding to the batch's longest."""
    return int(batch.size * lengths[batch].max())


@st.composite
def made(draw: st.DrawFn) -> tuple[NDArray[np.int64], int, list[int] | None]:
    """(lengths, tokens, boundaries)."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=60))
    tokens = draw(st.integers(max(lengths), 4 * max(lengths)))
    boundaries = draw(st.none() | st.sets(st.integers(1, 70), min_size=1).map(sorted))
    return np.array(lengths), tokens, boundaries


@given(made(), st.integers(0, 2**63), st.integers(0, 3))
def test_every_epoch_holds_every_sample_once_within_the_budget(
    given: tuple[NDArray[np.int64], int, list[int] | None], seed: int, epoch: int
) -> None:
    lengths, tokens, boundaries = given
    order = ByLength(lengths, tokens, seed=seed, boundaries=boundaries)
    batches = epoch_of(order, epoch)
    order.batch(epoch, 0)[:] = 0  # without harm
    fresh = ByLength(lengths, tokens, seed=seed, boundaries=boundaries)
    for number, batch in enumerate(batches):
        assert np.array_equal(fresh.batch(epoch, number), batch)
        assert np.array_equal(order.batch(epoch, number), batch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert max(cost(batch, lengths) for batch in batches) <= tokens
    edges = order.boundaries
    for batch in batches:
        assert np.unique(np.searchsorted(edges, lengths[batch])).size == 1  # of one bucket
    assert order.count(epoch) == order.count(epoch + 1)


@given(made(), st.integers(0, 2**63))
def test_full_batches_hold_what_they_can_and_short_ones_come_last_the_costliest_first(
    given: tuple[NDArray[np.int64], int, list[int] | None], seed: int
) -> None:
    lengths, tokens, boundaries = given
    order = ByLength(lengths, tokens, seed=seed, boundaries=boundaries)
    bucket = np.searchsorted(order.boundaries, lengths)
    longest = {int(each): int(lengths[bucket == each].max()) for each in np.unique(bucket)}
    batches = [(batch.size, int(bucket[batch[0]])) for batch in epoch_of(order, 0)]
    full = [size == tokens // longest[each] for size, each in batches]
    assert full == sorted(full, reverse=True)
    assert all(
        size * longest[each] > tokens - longest[each]
        for (size, each), whole in zip(batches, full, strict=True)
        if whole
    )
    short = [(size, each) for (size, each), whole in zip(batches, full, strict=True) if not whole]
    assert len({each for _, each in short}) == len(short)  # one a bucket at most
    costs = [size * longest[each] for size, each in short]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_are_balanced_in_every_full_step(size: int) -> None:
    """Of lengths as texts have them, a micro-batch for each rank: none costs less than what does
    not go into it any more leaves.
    """
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(4, 0.8, 20_000), 1, 512).astype(np.int64)
    tokens, longest = 4096, 512
    order = ByLength(lengths, tokens, seed=0)
    batches = epoch_of(order, 1)
    padded = np.array([cost(batch, lengths) for batch in batches])
    # at least: a bucket leaves one short micro-batch at most
    full = len(batches) - len(order.boundaries)
    assert full > 0.85 * len(batches)
    steps = padded[: full // size * size].reshape(-1, size)
    assert steps.max() <= tokens
    assert steps.min() > (tokens - longest) * 8 / 9  # a bucket's longest sample need not be in it
    by_rank = steps.sum(axis=0)
    assert by_rank.max() / by_rank.min() < 1.02
    assert lengths.sum() / padded.sum() > 0.93  # all but the padding


def test_epochs_and_seeds_put_other_samples_together_in_another_order() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 600)
    walks = [
        epoch_of(ByLength(lengths, 300, seed=seed), epoch)
        for seed in range(2)
        for epoch in range(2)
    ]
    together = [{frozenset(batch.tolist()) for batch in walk} for walk in walks]
    buckets = [tuple(int(lengths[batch].max()) // 10 for batch in walk) for walk in walks]
    for one in range(4):
        for other in range(one):
            assert len(together[one] & together[other]) < len(walks[one]) / 4
            assert buckets[one] != buckets[other]


def test_a_batch_that_there_is_not_is_refused() -> None:
    order = ByLength([3, 9, 4, 8, 3, 9, 4, 3, 9], 18, boundaries=[4, 9], seed=0)
    for number in (-1, 4):
        with refused("outside-order", name="number", value=number, count=4):
            order.batch(2, number)


def test_what_cannot_be_is_refused() -> None:
    with refused("sample-too-long", sample=2, length=100, tokens=99):
        ByLength([5, 51, 100, 51], 99, seed=0)
    with refused("wrong-value", name="lengths[1]", value=0):
        ByLength([3, 0], 18, seed=0)
    with refused("wrong-value", name="tokens", value=0):
        ByLength([3], 0, seed=0)
    with refused("boundaries-not-growing", number=1, value=4, before=4):
        ByLength([3], 18, boundaries=[4, 4], seed=0)
    with refused("wrong-value", name="boundaries[0]", value=0):
        ByLength([3], 18, boundaries=[0, 4], seed=0)
