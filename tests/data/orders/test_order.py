"""What holds for every order. Its samples are a function of (seed, epoch, position), the same on every
machine, and its fingerprint tells it from others. Through the Loader ranks share them, none twice;
their number changes nothing, nor does resuming anywhere with another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import BatchSampler

from lockstep.data.loader import Loader
from lockstep.data.orders import (
    BlockShuffled,
    ByLength,
    FromBatches,
    FromSampler,
    Mixture,
    Sequential,
    Shuffled,
    Weighted,
)
from tests.data.datasets import Augmented, Backwards, Pairs
from tests.data.orders.samplers import Drawing
from tests.data.test_loader import as_data

EPOCHS = 3
WEIGHTS = [5.0, 1.0, 1.0, 3.0, 2.0, 0.0]
LENGTHS = [3, 9, 4, 8, 3, 9, 4, 3, 9]
Step = dict[int, Any]  # a rank's micro-batches by slot


def lengths(samples: int) -> list[int]:
    return (1 + np.arange(samples) * 7 % 12).tolist()


def mixture(samples: int, seed: int) -> Mixture:
    """As many as there are, of two components; the small one is gone through again in the same
    epoch.
    """
    return Mixture([samples - samples // 3, samples // 3], [1, 2], seed=seed)


def cut(samples: int, stream: str) -> BatchSampler:
    return BatchSampler(Drawing(samples, stream), 3, drop_last=False)


POSITIONS: dict[str, Callable[[int, int], Any]] = {
    "shuffled": Shuffled,
    "blocks": lambda samples, seed: BlockShuffled(samples, 4, seed),
    "weighted": lambda samples, seed: Weighted(lengths(samples), seed=seed),
    "weighted without replacement": lambda samples, seed: Weighted(
        lengths(samples), replacement=False, seed=seed
    ),
    "mixture": mixture,
    "sampler": lambda samples, seed: FromSampler(Drawing(samples, "torch"), seed=seed),
}
ORDERS: dict[str, Callable[[int, int], Any]] = {
    **POSITIONS,
    "sequential": lambda samples, seed: Sequential(samples),
    "backwards": lambda samples, seed: Backwards(samples),
    "torch's own": lambda samples, seed: Drawing(samples, "own torch"),
}
BATCHES: dict[str, Callable[[int, int], Any]] = {
    "by length": lambda samples, seed: ByLength(lengths(samples), 24, seed=seed),
    "batches": lambda samples, seed: FromBatches(cut(samples, "random"), seed=seed),
    "torch's batches": lambda samples, seed: cut(samples, "own numpy"),
    "more batches in each epoch": lambda samples, seed: Pairs(),
}
REPEATING = {"weighted", "mixture", "more batches in each epoch"}


def epoch_of(order: Any, epoch: int) -> list[Any]:
    """An epoch's samples, or its micro-batches where the order makes them."""
    if hasattr(order, "batch"):
        return [order.batch(epoch, number).tolist() for number in range(order.count(epoch))]
    return order.at(epoch, np.arange(order.samples, dtype=np.int64)).tolist()


@pytest.mark.parametrize("samples", [50, 5000])
@pytest.mark.parametrize("kind", POSITIONS)
def test_an_order_is_a_function_without_memory(kind: str, samples: int) -> None:
    """Positions are asked for alone, in any shape and after any epoch, and what is returned may be
    changed.
    """
    order = POSITIONS[kind](samples, 1)
    epochs = {epoch: np.array(epoch_of(order, epoch)) for epoch in (3, 0)}
    asked = np.random.default_rng(0).integers(0, order.samples, 12)
    for positions in (asked, asked.reshape(2, 6), asked.reshape(3, 2, 2), asked[::-2], asked[:0]):
        for epoch, elements in epochs.items():
            before = positions.copy()
            returned = order.at(epoch, positions)
            assert np.array_equal(returned, elements[positions])
            assert returned.shape == positions.shape
            assert np.array_equal(positions, before)
    order.at(3, asked)[:] = 0
    assert np.array_equal(order.at(3, asked), epochs[3][asked])
    for epoch, elements in epochs.items():
        assert epoch_of(POSITIONS[kind](samples, 1), epoch) == elements.tolist()


@pytest.mark.parametrize("kind", [*POSITIONS, "by length", "batches"])
def test_epochs_and_seeds_have_orders_of_their_own(kind: str) -> None:
    orders = [(ORDERS | BATCHES)[kind](50, seed) for seed in range(3)]
    assert len({str(epoch_of(order, epoch)) for order in orders for epoch in range(3)}) == 9


@pytest.mark.parametrize(
    ("order", "epochs"),
    [
        (Sequential(4), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (BlockShuffled(10, 4, 1), [[8, 9, 7, 6, 5, 4, 1, 0, 2, 3], [8, 9, 1, 3, 2, 0, 5, 7, 4, 6]]),
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


def different_orders() -> list[Any]:
    batches: list[Any] = [[[0, 1], [2]], [[0], [1, 2]], [[0, 1, 2]], [[0, 1], [3]]]
    return [
        *(Sequential(samples) for samples in (50, 51)),
        *(Shuffled(*sizes) for sizes in ((50, 0), (51, 0), (50, 1))),
        *(BlockShuffled(*sizes) for sizes in ((50, 7, 0), (51, 7, 0), (50, 8, 0), (50, 7, 1))),
        *(Weighted(WEIGHTS, seed=seed) for seed in (0, 1)),
        *(Weighted(WEIGHTS, samples=4, replacement=again, seed=0) for again in (True, False)),
        Weighted([*WEIGHTS[:-1], 0.25], seed=0),
        *(Mixture([10, 3], [1, 5], seed=seed) for seed in (0, 1)),
        Mixture([10, 3], [1, 6], seed=0),
        Mixture([3, 10], [1, 5], seed=0),
        Mixture([10, 3], [1, 5], samples=12, seed=0),
        *(ByLength(LENGTHS, 18, seed=seed) for seed in (0, 1)),
        ByLength(LENGTHS, 19, seed=0),
        ByLength(LENGTHS[::-1], 18, seed=0),
        ByLength([*LENGTHS[:-1], 8], 18, seed=0),
        ByLength(LENGTHS, 18, boundaries=[4, 9], seed=0),
        *(FromSampler(Drawing(20, "torch"), seed=seed) for seed in (0, 1)),
        *(FromSampler(order) for order in ([1, 2], [2, 1])),
        *(FromBatches(order) for order in batches),
        FromBatches(batches[0], seed=1),
    ]


def test_fingerprints_tell_orders_apart() -> None:
    fingerprints = [order.fingerprint() for order in different_orders()]
    assert len(set(fingerprints)) == len(fingerprints)
    assert [order.fingerprint() for order in different_orders()] == fingerprints


# -- through a Loader ----------------------------------------------------------------------------


def loader(
    kind: str, samples: int, rank: int, size: int, state: Any = None, balance: str | None = None
) -> Loader:
    """As a rank makes it: with an order of its own."""
    options: dict[str, Any] = {"global_batch": 10, "micro_batch": 2}
    if kind in BATCHES:
        options = {"micro_batches": 5}
    options |= {"order": (ORDERS | BATCHES)[kind](samples, 7), "balance": balance}
    made = Loader(Augmented(samples), **options, rank=rank, size=size, device="cpu")
    if state is not None:
        made.load_state_dict(state)
    return made


def walked(kind: str, samples: int, size: int, *options: Any) -> list[dict[int, Step]]:
    """By rank: step -> its micro-batches."""
    return [
        {
            window.step: {
                slot: as_data(batch) for slot, batch in zip(window.slots, window, strict=True)
            }
            for epoch in loader(kind, samples, rank, size, *options).epochs(EPOCHS)
            for window in epoch
        }
        for rank in range(size)
    ]


def together(ranks: list[dict[int, Step]]) -> dict[int, Step]:
    """What the ranks consume in each step. Fails where two of them have the same micro-batch, or
    one has fewer steps.
    """
    found: dict[int, Step] = {}
    for step in ranks[0]:
        every = [(slot, batch) for rank in ranks for slot, batch in rank[step].items()]
        assert len({slot for slot, _ in every}) == len(every)
        found[step] = dict(sorted(every))
    assert [list(rank) for rank in ranks] == [list(found)] * len(ranks)
    return found


@pytest.mark.parametrize("samples", [37, 40, 5], ids=["ragged", "even", "fewer than ranks"])
@pytest.mark.parametrize("kind", ORDERS | BATCHES)
def test_every_sample_comes_once_in_the_same_step_at_any_number_of_ranks(
    kind: str, samples: int
) -> None:
    alone = together(walked(kind, samples, 1))
    lengths = [len(epoch) for epoch in loader(kind, samples, 0, 1).epochs(EPOCHS)]
    assert len(alone) == sum(lengths)
    steps = iter(alone.values())
    for length in lengths:
        batches = [batch for _ in range(length) for batch in next(steps).values()]
        seen = sorted(index for indices, _ in batches for index in indices)
        assert kind in REPEATING or seen == list(range(samples))
    for size in (2, 3, 8):
        assert together(walked(kind, samples, size)) == alone, size


@pytest.mark.parametrize("kind", ORDERS | BATCHES)
def test_every_state_resumes_at_every_number_of_ranks_whatever_their_shares(kind: str) -> None:
    undisturbed = together(walked(kind, 37, 1))
    ranks = [loader(kind, 37, rank, 3) for rank in range(3)]
    walks = [(window for epoch in rank.epochs(EPOCHS) for window in epoch) for rank in ranks]
    states = [ranks[0].state_dict()]
    for _ in undisturbed:
        for walk in walks:
            list(next(walk))
        saved = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
        assert saved == [saved[0]] * 3
        states.append(saved[0])
    assert [state["step"] for state in states] == list(range(len(undisturbed) + 1))
    for step, state in enumerate(states):
        rest = {number: slots for number, slots in undisturbed.items() if number >= step}
        for size, balance in ((1, None), (8, "0,1,2,0,1,3,1,1")):
            assert together(walked(kind, 37, size, state, balance)) == rest, (step, size)
