"""Use a user's torch sampler as an order. The sampler is iterated once an epoch, for all ranks
together. Its randomness is keyed, and the caller's random states do not change.

A sampler that gives each rank a part is iterated once for each rank, and the parts are merged:

    rank 0   4 1 5              4 2 | 1 0 | 5 4         of 5 samples: the last index is padding
    rank 1   2 0 4
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from lockstep.data.orders.numbers import digest
from lockstep.data.permutation import Indices
from lockstep.errors import UsageError
from lockstep.runtime import randomness

_NOTHING = object()


class KeyedSampler:
    """Lists what `sampler` yields in an epoch. The list depends only on (seed, epoch), as far as
    the sampler's randomness can be keyed.

    The keyed generators are the global ones of torch, numpy and `random`, and any generator of
    these three libraries in an attribute of the sampler or of its `sampler`. `set_epoch` is called
    if it exists. `same` detects a sampler with other hidden state when an epoch is repeated.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.name = type(sampler).__name__
        if isinstance(sampler, Iterator) and iter(sampler) is sampler:
            # iter() of any other sampler may draw random numbers, so it is not called here
            raise UsageError("sampler-used-up", sampler=self.name)
        self._sampler = sampler
        self._seed = seed
        self._digests: dict[int, str] = {}
        self._reminded = False

    def epoch(self, epoch: int) -> list[Any]:
        """Return what the sampler yields in an epoch. Raises UsageError if it yields nothing."""
        self._remind(epoch)
        sampler = self._sampler
        inner = getattr(sampler, "sampler", None)
        if _is_distributed(sampler):
            order = self._merged(sampler, epoch)
        elif _is_distributed(inner):
            sampler = copy.copy(sampler)
            sampler.sampler = self._merged(inner, epoch)
            order = self._list(sampler, epoch)
        else:
            order = self._list(sampler, epoch)
        if not order:
            raise UsageError("epoch-of-nothing", name=self.name, epoch=epoch)
        return order

    def same(self, epoch: int, digest: str) -> str:
        """Return `digest`. Raises UsageError if this epoch had another digest before."""
        if self._digests.setdefault(epoch, digest) != digest:
            raise UsageError("sampler-not-repeatable", sampler=self.name, epoch=epoch)
        return digest

    def _merged(self, sampler: Any, epoch: int) -> list[Any]:
        """Return the order of all ranks, from a sampler that gives each rank a part."""
        parts = []
        for rank in range(sampler.num_replicas):
            sampler_of_rank = copy.copy(sampler)
            sampler_of_rank.rank = rank
            parts.append(self._list(sampler_of_rank, epoch))
        if getattr(sampler, "split", "interleaved") == "blocks":
            order = list(chain.from_iterable(parts))
        else:
            filled = chain.from_iterable(zip_longest(*parts, fillvalue=_NOTHING))
            order = [index for index in filled if index is not _NOTHING]
        # padding can be recognised only in a list of samples, not of batches
        if order and not hasattr(order[0], "__index__"):
            return order
        dataset: Any = getattr(sampler, "dataset", None)
        return order[: len(dataset)] if hasattr(dataset, "__len__") else order

    def _list(self, sampler: Any, epoch: int) -> list[Any]:
        with _keyed(sampler, self._seed, epoch):
            for level in _levels(sampler):
                if hasattr(level, "set_epoch"):
                    level.set_epoch(epoch)
            return list(sampler)

    def _remind(self, epoch: int) -> None:
        for sampler in _levels(self._sampler):
            forgotten = (
                _is_distributed(sampler)
                and hasattr(sampler, "set_epoch")
                and getattr(sampler, "epoch", epoch) != epoch
            )
            if forgotten and not self._reminded:
                self._reminded = True
                warnings.warn(
                    f"{type(sampler).__name__}.set_epoch({epoch}) was not called, so every epoch"
                    " would have the same order. Lockstep calls it now, and in later epochs",
                    stacklevel=4,
                )


def _levels(sampler: Any) -> tuple[Any, Any]:
    """Return the sampler and its `sampler`, None if it has none."""
    return sampler, getattr(sampler, "sampler", None)


def _is_distributed(sampler: Any) -> bool:
    """Whether the sampler gives each rank a different part."""
    return isinstance(getattr(sampler, "num_replicas", None), int) and hasattr(sampler, "rank")


@contextmanager
def _keyed(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    with randomness.preserved(), ExitStack() as later:
        key = randomness.sampler(seed, epoch)
        attributes: list[Any] = []
        for level in _levels(sampler):
            attributes.extend(getattr(level, "__dict__", {}).values())
        for number, generator in enumerate(attributes):
            _seed(generator, randomness.derive(key, number), later)
        yield


def _seed(generator: Any, key: int, later: ExitStack) -> None:
    import torch

    if isinstance(generator, torch.Generator):
        later.callback(generator.set_state, generator.get_state())
        generator.manual_seed(key)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        later.callback(setattr, bits, "state", bits.state)
        bits.state = type(bits)(key).state
    elif isinstance(generator, random.Random):
        later.callback(generator.setstate, generator.getstate())
        generator.seed(key)
    elif isinstance(generator, np.random.RandomState):
        later.callback(generator.set_state, generator.get_state())
        generator.seed(key & 0xFFFFFFFF)


def indices(
    name: str, values: list[Any], length: int | None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return `values` as int64, shape [len(values)]. Raises UsageError, naming position and value,
    for a value that is no int, negative, or not below `length`.
    """
    if set(map(type, values)) != {int}:
        values = [_int(name, position, value) for position, value in enumerate(values)]
    limit = 2**63 if length is None else length
    if min(values) < 0 or max(values) >= limit:
        for position, value in enumerate(values):
            if not 0 <= value < limit:
                known = "0 or more" if length is None and value < 0 else f"in [0, {limit})"
                raise UsageError(
                    "not-an-index", name=name, value=value, place=position, range=known
                )
    return np.array(values, dtype=np.int64)


def _int(name: str, position: int, value: Any) -> int:
    try:
        if not isinstance(value, (bool, np.bool_)):
            return int(value.__index__())
    except (AttributeError, TypeError):
        pass
    raise UsageError("not-an-index", name=name, value=value, place=position, range="a whole number")


class FromSampler:
    """The indices that `sampler` yields, equally many in every epoch. It is iterated once an epoch,
    and the indices of one epoch are kept.

    Its randomness is keyed by (seed, epoch), the caller's random states do not change, and
    `set_epoch` is called if it exists. A sampler that gives each rank a part (torch's
    DistributedSampler, and Lockstep's) gives the order of all ranks, without padding. `length` is
    the data set's, to check the indices. The constructor iterates epoch 0, to count its samples.

    Raises:
        UsageError: an index that is no whole number or outside the data set, an epoch that is empty
            or has another number of indices, a sampler that yields other indices for the same epoch
            the second time.
    """

    def __init__(self, sampler: Iterable[int], *, length: int | None = None, seed: int = 0) -> None:
        self._sampler = KeyedSampler(sampler, seed)
        self._length = length
        self.seed = seed
        self._last = -1, indices(self._sampler.name, [0], None)
        self.samples = 0
        self.samples = self._epoch(0).size
        self._first_digest = self.digest(0)

    def at(self, epoch: int, positions: Indices) -> Indices:
        return self._epoch(epoch)[positions]

    def digest(self, epoch: int) -> str:
        """Return the SHA-256, in hex, of the epoch's indices. All ranks must have the same one,
        else they train on different orders.
        """
        return digest(self._epoch(epoch))

    def fingerprint(self) -> str:
        return (
            f"sampler {self._sampler.name}, {self.samples} samples, epoch 0 {self._first_digest[:16]}, seed"
            f" {self.seed}"
        )

    def _epoch(self, epoch: int) -> Indices:
        if self._last[0] != epoch:
            order = indices(self._sampler.name, self._sampler.epoch(epoch), self._length)
            if self.samples and order.size != self.samples:
                raise UsageError(
                    "epochs-of-other-length",
                    sampler=self._sampler.name,
                    first=self.samples,
                    count=int(order.size),
                    epoch=epoch,
                )
            self._sampler.same(epoch, digest(order))
            self._last = epoch, order
        return self._last[1]


class FromBatches:
    """The micro-batches that `batch_sampler` yields. It is iterated once an epoch, and the batches
    of one epoch are kept. Their number may change between epochs.

    Randomness and `set_epoch` work as in FromSampler. A torch BatchSampler around a sampler that
    gives each rank a part cuts the order of all ranks, without padding. A batch sampler that itself
    gives each rank its batches yields those of all ranks in turn, with padding: a repeated sample
    may be intended. `length` is the data set's, to check the indices.

    Raises:
        UsageError: an empty batch, a batch that is no list of indices, an index that is no whole
            number or outside the data set, an epoch without batches, a sampler that yields other
            batches for the same epoch the second time.
    """

    def __init__(
        self, batch_sampler: Iterable[Sequence[int]], *, length: int | None = None, seed: int = 0
    ) -> None:
        self._sampler = KeyedSampler(batch_sampler, seed)
        self._length = length
        self.seed = seed
        self._last: tuple[int, list[Indices], str] = -1, [], ""
        self._first_digest = self.digest(0)

    def count(self, epoch: int) -> int:
        return len(self._epoch(epoch)[1])

    def batch(self, epoch: int, number: int) -> Indices:
        return self._epoch(epoch)[1][number].copy()

    def digest(self, epoch: int) -> str:
        """Return the SHA-256, in hex, of the sizes and indices of the epoch's batches. All ranks
        must have the same one, else they train on different batches.
        """
        return self._epoch(epoch)[2]

    def fingerprint(self) -> str:
        return (
            f"batches of {self._sampler.name}, epoch 0 {self._first_digest[:16]}, seed {self.seed}"
        )

    def _epoch(self, epoch: int) -> tuple[int, list[Indices], str]:
        if self._last[0] != epoch:
            batches = []
            for number, batch in enumerate(self._sampler.epoch(epoch)):
                batches.append(self._checked(epoch, number, batch))
            sizes = np.array([batch.size for batch in batches], dtype=np.int64)
            digest_of_epoch = digest(np.concatenate([sizes, *batches]))
            self._last = epoch, batches, self._sampler.same(epoch, digest_of_epoch)
        return self._last

    def _checked(self, epoch: int, number: int, batch: Sequence[int]) -> Indices:
        name = f"{self._sampler.name}, batch {number} of epoch {epoch},"
        if not hasattr(batch, "__iter__"):
            raise UsageError("not-a-batch", name=name, value=batch)
        values = list(batch)
        if not values:
            raise UsageError("not-a-batch", name=name, value=values)
        return indices(name, values, self._length)
