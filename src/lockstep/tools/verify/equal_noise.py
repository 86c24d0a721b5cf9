"""Samples that get the same noise because the data set seeds a global generator itself. Trainings
at different numbers of workers agree about it, so no comparison of trainings shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lockstep.data.keyed import fetches_at_once
from lockstep.runtime import randomness
from lockstep.tools.verify.trace import random_states


def samples_with_equal_noise(
    dataset: Any, seed: int, indices: Iterable[int]
) -> tuple[int, int] | None:
    """Return two of these samples after which a global generator is in the same state; else None.

    Each sample is fetched under its own random stream, as a Loader does. The states of the process
    do not change.
    """
    index_by_state: dict[tuple[str, str], int] = {}
    for index in indices:
        for state in _states_that_fetching_leaves(dataset, seed, index):
            earlier = index_by_state.setdefault(state, index)
            if earlier != index:
                return earlier, index
    return None


def _states_that_fetching_leaves(dataset: Any, seed: int, index: int) -> set[tuple[str, str]]:
    """Return (generator, digest of its state) for each generator that fetching the sample moves."""
    device = torch.device("cpu")
    with randomness.preserved():
        randomness.sample(seed, 0, index)
        before = set(random_states(device).items())
        if fetches_at_once(dataset):
            dataset.__getitems__([index])
        else:
            dataset[index]
        return set(random_states(device).items()) - before
