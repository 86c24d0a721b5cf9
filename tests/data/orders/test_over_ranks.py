"""Every order through the Loader: ranks share its samples, none twice; their number changes
nothing, nor does resuming with another one.
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
from tests.data.datasets import Numbers
from tests.data.orders.samplers import Drawing

EPOCHS = 3
Step = dict[int, list[int]]  # a rank's micro-batches by slot


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
    "by length": lambda samples: ByLength(lengths(samples), 24, seed=7),
    "batches": lambda samples: FromBatches(
        BatchSampler(Drawing(samples, "random"), 3, False), length=samples, seed=7
    ),
    "torch's batches": lambda samples: BatchSampler(
        Drawing(samples, "own numpy"), 3, drop_last=False
    ),
}
REPEATING = {"weighted", "mixture"}
OF_BATCHES = {"by length", "batches", "torch's batches"}


def loader(kind: str, samples: int, rank: int, size: int, state: Any = None) -> Loader:
    """As a rank makes it: with an order of its own."""
    sizes = {"micro_batches": 5} if kind in OF_BATCHES else {"global_batch": 10, "micro_batch": 2}
    made = Loader(
        Numbers(samples), order=MAKE[kind](samples), **sizes, rank=rank, size=size, device="cpu"
    )  # type: ignore[arg-type]
    if state is not None:
        made.load_state_dict(state)
    return made


def walked(kind: str, samples: int, size: int, state: Any = None) -> list[dict[int, Step]]:
    """By rank: step -> its micro-batches."""
    return [
        {
            window.step: {
                slot: batch.tolist() for slot, batch in zip(window.slots, window, strict=True)
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
                for index in batch.tolist()
            ]
            assert sorted(seen) == list(range(samples)), (size, number)


@pytest.mark.parametrize(
    "sizes", [(1, 3), (3, 8), (8, 2)], ids=lambda sizes: "{} ranks, then {}".format(*sizes)
)
@pytest.mark.parametrize("kind", MAKE)
def test_a_state_of_the_middle_of_an_epoch_goes_on_with_another_number_of_ranks(
    kind: str, sizes: tuple[int, int]
) -> None:
    undisturbed = together(walked(kind, 37, sizes[0]))
    middle = 1 + next(step for step in undisturbed if step >= len(undisturbed) // 2)
    ranks = [loader(kind, 37, rank, sizes[0]) for rank in range(sizes[0])]
    for each in ranks:
        windows = (window for epoch in each.epochs(EPOCHS) for window in epoch)
        for _ in range(middle):
            list(next(windows))
    states = [json.loads(json.dumps(each.state_dict())) for each in ranks]
    assert states == [states[0]] * sizes[0]
    assert states[0]["step_in_epoch"] > 0
    rest = together(walked(kind, 37, sizes[1], states[0]))
    assert rest == {step: slots for step, slots in undisturbed.items() if step >= middle}
