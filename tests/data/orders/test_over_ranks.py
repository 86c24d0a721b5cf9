"""Every order through the Loader: ranks share its samples, none twice; their number changes
nothing, nor does resuming anywhere with another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import BatchSampler, RandomSampler

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
Step = dict[int, Any]  # a rank's micro-batches by slot


def lengths(samples: int) -> list[int]:
    return (1 + np.arange(samples) * 7 % 12).tolist()


def mixture(samples: int) -> Mixture:
    """As many as there are, of two components; the small one is gone through again in the same
    epoch.
    """
    return Mixture([samples - samples // 3, samples // 3], [1, 2], seed=7)


MAKE: dict[str, Callable[[int], Any]] = {
    "sequential": Sequential,
    "shuffled": lambda samples: Shuffled(samples, 7),
    "blocks": lambda samples: BlockShuffled(samples, 4, 7),
    "weighted": lambda samples: Weighted(lengths(samples), seed=7),
    "weighted without replacement": lambda samples: Weighted(
        lengths(samples), replacement=False, seed=7
    ),
    "mixture": mixture,
    "sampler": lambda samples: FromSampler(RandomSampler(range(samples)), length=samples, seed=7),
    "torch's own": lambda samples: Drawing(samples, "own torch"),
    "backwards": Backwards,
    "by length": lambda samples: ByLength(lengths(samples), 24, seed=7),
    "batches": lambda samples: FromBatches(
        BatchSampler(Drawing(samples, "random"), 3, False), length=samples, seed=7
    ),
    "torch's batches": lambda samples: BatchSampler(
        Drawing(samples, "own numpy"), 3, drop_last=False
    ),
    "more batches in each epoch": lambda _: Pairs(),
}
REPEATING = {"weighted", "mixture", "more batches in each epoch"}
OF_BATCHES = {"by length", "batches", "torch's batches", "more batches in each epoch"}


def loader(kind: str, samples: int, rank: int, size: int, state: Any = None) -> Loader:
    """As a rank makes it: with an order of its own."""
    sizes = {"micro_batches": 5} if kind in OF_BATCHES else {"global_batch": 10, "micro_batch": 2}
    made = Loader(
        Augmented(samples), order=MAKE[kind](samples), **sizes, rank=rank, size=size, device="cpu"
    )  # type: ignore[arg-type]
    if state is not None:
        made.load_state_dict(state)
    return made


def walked(kind: str, samples: int, size: int, state: Any = None) -> list[dict[int, Step]]:
    """By rank: step -> its micro-batches."""
    return [
        {
            window.step: {
                slot: as_data(batch) for slot, batch in zip(window.slots, window, strict=True)
            }
            for epoch in loader(kind, samples, rank, size, state).epochs(EPOCHS)
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
@pytest.mark.parametrize("kind", MAKE)
def test_a_steps_samples_do_not_depend_on_the_number_of_ranks(kind: str, samples: int) -> None:
    alone = together(walked(kind, samples, 1))
    assert len(alone) == sum(len(epoch) for epoch in loader(kind, samples, 0, 1).epochs(EPOCHS))
    for size in (2, 3, 8):
        assert together(walked(kind, samples, size)) == alone, size


@pytest.mark.parametrize("samples", [37, 5])
@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind not in REPEATING])
def test_an_epoch_holds_every_sample_once_over_all_ranks(kind: str, samples: int) -> None:
    for size in (1, 2, 3, 8):
        ranks = [loader(kind, samples, rank, size) for rank in range(size)]
        for number in range(2):
            seen = [
                index
                for rank in ranks
                for window in next(rank.epochs(number + 1, start=number))
                for batch in window
                for index in batch[0].tolist()
            ]
            assert sorted(seen) == list(range(samples)), (size, number)


@pytest.mark.parametrize("kind", MAKE)
def test_every_state_resumes_at_every_number_of_ranks(kind: str) -> None:
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
        for size in (1, 2, 8):
            assert together(walked(kind, 37, size, state)) == rest, (step, size)
