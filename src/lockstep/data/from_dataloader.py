"""A Loader with the data set, sampler, collate, workers and batch size of torch's DataLoader.

`batch_size` becomes the global batch: what it was on one process. The order stays what it was where
the script decides it (a sequential or another sampler, a generator). Plain `shuffle=True` takes its
order from torch's global generator, which ranks do not share: here it is the keyed permutation of
`seed`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lockstep.data.loader import Loader, is_iterable
from lockstep.data.orders.from_sampler import indices
from lockstep.data.orders.numbers import digest
from lockstep.data.orders.weighted import Weighted
from lockstep.data.permutation import Indices
from lockstep.errors import UsageError
from lockstep.runtime import randomness


def from_dataloader(
    dataloader: DataLoader[Any],
    *,
    micro_batch: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Any:
    """Return a Loader, or a StreamLoader for an iterable data set, that loads as `dataloader` does.

    Args:
        dataloader: torch's, with a `batch_size` or a batch sampler whose batches have one size.
        micro_batch: samples of a forward. Default: a rank's share of a step in one.
        seed: keys the shuffle and the random numbers of each sample.
        device: where batches arrive. Default: this rank's device.

    Raises:
        UsageError: `batch_size=None`, batches of different sizes, and what a Loader refuses.
    """
    options: dict[str, Any] = {
        "micro_batch": micro_batch,
        "seed": seed,
        "num_workers": dataloader.num_workers,
        "collate_fn": dataloader.collate_fn,
        "pin_memory": dataloader.pin_memory or None,
        "device": device,
    }
    batch_sampler: Any = dataloader.batch_sampler
    if batch_sampler is None:
        raise UsageError("dataloader-without-batches")
    if dataloader.worker_init_fn is not None:
        raise UsageError("dataloader-with-worker-init")
    if is_iterable(dataloader.dataset):
        options.update(global_batch=dataloader.batch_size, drop_last=dataloader.drop_last)
        return Loader(dataloader.dataset, **options)
    if type(batch_sampler) is not BatchSampler:
        batches: Any = SamplesOfBatches(batch_sampler)
        return Loader(dataloader.dataset, order=batches, global_batch=batches.size, **options)
    order = _order(dataloader, batch_sampler.sampler, seed)
    if order is None:
        options["shuffle"] = isinstance(batch_sampler.sampler, RandomSampler)
    return Loader(
        dataloader.dataset,
        order=order,
        global_batch=batch_sampler.batch_size,
        drop_last=batch_sampler.drop_last,
        **options,
    )


def is_shuffled(dataloader: DataLoader[Any]) -> bool:
    """Whether the order is a permutation that the script leaves to chance: plain `shuffle=True`."""
    sampler: Any = getattr(dataloader.batch_sampler, "sampler", None)
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
        and sampler.generator is None
        and dataloader.generator is None
    )


def _order(dataloader: DataLoader[Any], sampler: Any, seed: int) -> Any:
    """Return the order for a Loader; None for a sequential or a keyed one."""
    if type(sampler) is SequentialSampler or is_shuffled(dataloader):
        return None
    replaced = type(sampler) is RandomSampler and sampler.replacement
    if replaced and sampler.generator is None and dataloader.generator is None:
        # without the list of them all, of which there may be billions
        alike = np.ones(len(sampler.data_source))
        return Weighted(alike, samples=sampler.num_samples, seed=seed)
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        return DrawnOrder(dataloader, sampler)
    return sampler


class DrawnOrder:
    """The order that a DataLoader draws, epoch after epoch, from the state that its sampler's
    generator has now. The generator itself does not change.

    To draw an epoch after a resume, the epochs before it are drawn again. No sample is loaded.

    Args:
        dataloader: the DataLoader, which draws from the same generator if it has it.
        sampler: its sampler, with a `generator`.

    Raises:
        UsageError: an index outside the data set.
    """

    def __init__(self, dataloader: DataLoader[Any], sampler: Any) -> None:
        self._generator: torch.Generator = sampler.generator
        self._name = type(sampler).__name__
        self._length = len(dataloader.dataset)  # type: ignore[arg-type]
        # a DataLoader draws one number of its own at the start of each epoch
        self._numbers: DataLoader[Any] = DataLoader(
            range(self._length),  # type: ignore[arg-type]
            batch_size=4096,
            sampler=sampler,
            generator=dataloader.generator,
            collate_fn=list,
        )
        self._first = self._generator.get_state()
        self._state = self._first
        self._epoch = -1
        self._indices = indices(self._name, [0], None)
        self.samples = self._at(0).size
        self._first_digest = self.digest(0)

    def at(self, epoch: int, positions: Indices) -> Indices:
        return self._at(epoch)[positions]

    def digest(self, epoch: int) -> str:
        """Return the SHA-256, in hex, of the epoch's indices. All ranks must have the same one."""
        return digest(self._at(epoch))

    def fingerprint(self) -> str:
        return (
            f"generator of {self._name}, {self.samples} samples, epoch 0 {self._first_digest[:16]}"
        )

    def _at(self, epoch: int) -> Indices:
        if epoch < self._epoch:
            self._epoch = -1
            self._state = self._first
        while self._epoch < epoch:
            self._draw()
        return self._indices

    def _draw(self) -> None:
        """Draw the next epoch."""
        before = self._generator.get_state()
        with randomness.preserved():
            self._generator.set_state(self._state)
            order: list[int] = []
            for numbers in self._numbers:
                order += numbers
            self._state = self._generator.get_state()
        self._generator.set_state(before)
        self._indices = indices(self._name, order, self._length)
        self._epoch += 1


class SamplesOfBatches:
    """The samples of a batch sampler's batches, one after the other. Each batch is a global batch;
    all have one size, except the last one of an epoch.

    Args:
        batch_sampler: yields lists of indices.

    Raises:
        UsageError: batches of different sizes.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self.sampler = batch_sampler  # its generators are keyed, and its set_epoch is called
        self.size = 0
        with randomness.preserved():
            self.size = len(next(iter(copy.copy(batch_sampler)), ()))

    def __iter__(self) -> Iterator[int]:
        last: Sequence[int] | None = None
        for batch in self.sampler:
            if last is not None and len(last) != self.size:
                raise UsageError(
                    "global-batches-of-different-size", first=self.size, size=len(last)
                )
            yield from batch
            last = batch
        if last is not None and len(last) > self.size:
            raise UsageError("global-batches-of-different-size", first=self.size, size=len(last))
