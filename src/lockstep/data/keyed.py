"""The user's data set as the loader's processes see it: every sample, and every batch, made under its own random stream.

Augmentation then depends on (seed, epoch, index) alone: not on the rank, not on the number of loader workers, not on what was fetched
before. Batches are made here too, because a collate function may draw as well (masked tokens, mixed images).
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.data import Dataset, StackDataset, Subset, default_collate

from lockstep import randomness
from lockstep.orphans import die_with_parent

Key = tuple[int, int]  # (epoch, index of a sample)


class KeyedDataset(Dataset[Any]):
    """Makes a whole micro-batch from the keys of its samples; leaves the random states of the process as they were.

    A data set with a `__getitems__` of its own is asked once for all samples. Nobody can seed it between them, so it draws from the
    stream of the first sample.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate or default_collate
        self._at_once = fetches_at_once(dataset)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        epoch, first = keys[0]
        with randomness.preserved():
            if self._at_once:
                randomness.sample(self._seed, epoch, first)
                samples = self._dataset.__getitems__([index for _, index in keys])
            else:
                samples = [self._one(epoch, index) for epoch, index in keys]
            randomness.collate(self._seed, epoch, first)
            return self._collate(samples)

    def _one(self, epoch: int, index: int) -> Any:
        randomness.sample(self._seed, epoch, index)
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"This was sample {index} of {type(self._dataset).__name__}, in epoch {epoch}.")
            raise


def fetches_at_once(dataset: object) -> bool:
    """Whether the data set has a way of its own to fetch several samples in one call; torch's wrappers have what they wrap has."""
    if isinstance(dataset, Subset):
        return fetches_at_once(dataset.dataset)
    if isinstance(dataset, StackDataset):
        children = dataset.datasets
        return any(map(fetches_at_once, children.values() if isinstance(children, dict) else children))
    return callable(getattr(dataset, "__getitems__", None))


def made(batch: Any) -> Any:
    """The collate function for DataLoader: nothing is left to do."""
    return batch


def worker_setup() -> Callable[[int], None] | None:
    """What a worker that this process is about to start does first: bind its life to this process's.

    Linux binds it to the *thread* that starts it. From any thread but the main one, which may end before the workers shall, nothing is
    bound: torch's workers look for their parent every few seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return partial(_bind, os.getpid())


def _bind(parent: int, worker: int) -> None:
    # With "forkserver" the kernel's parent is that server, which ends with the process it serves.
    die_with_parent(os.getppid() if multiprocessing.get_start_method() == "forkserver" else parent)
