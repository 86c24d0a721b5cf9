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

_NOBODY = object()


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
        self._sampler, self._seed = sampler, seed
        self._digests: dict[int, str] = {}
        self._reminded = False

    def epoch(self, epoch: int) -> list[Any]:
        """Return what the sampler yields in an epoch. Raises UsageError if it yields nothing."""
        self._remind(epoch)
        inner = getattr(self._sampler, "sampler", None)
        if _deals(self._sampler):
            found = self._dealt(self._sampler, epoch)
        elif _deals(inner):
            whole = copy.copy(self._sampler)
            whole.sampler = self._dealt(inner, epoch)
            found = self._ask(whole, epoch)
        else:
            found = self._ask(self._sampler, epoch)
        if not found:
            raise UsageError("epoch-of-nothing", name=self.name, epoch=epoch)
        return found

    def same(self, epoch: int, digest: str) -> str:
        """Return `digest`. Raises UsageError if this epoch had another digest before."""
        if self._digests.setdefault(epoch, digest) != digest:
            raise UsageError("sampler-not-repeatable", sampler=self.name, epoch=epoch)
        return digest

    def _dealt(self, sampler: Any, epoch: int) -> list[Any]:
        ranks = []
        for rank in range(sampler.num_replicas):
            one = copy.copy(sampler)
            one.rank = rank
            ranks.append(self._ask(one, epoch))
        if getattr(sampler, "split", "interleaved") == "blocks":
            found = list(chain.from_iterable(ranks))
        else:
            found = [
                each
                for row in zip_longest(*ranks, fillvalue=_NOBODY)
                for each in row
                if each is not _NOBODY
            ]
        # padding can be recognised only in a list of samples, not of batches
        batches = bool(found) and not hasattr(found[0], "__index__")
        dataset: Any = getattr(sampler, "dataset", None)
        return found if batches or not hasattr(dataset, "__len__") else found[: len(dataset)]

    def _ask(self, sampler: Any, epoch: int) -> list[Any]:
        with _keyed(sampler, self._seed, epoch):
            every: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
            for each in every:
                if hasattr(each, "set_epoch"):
                    each.set_epoch(epoch)
            return list(sampler)

    def _remind(self, epoch: int) -> None:
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            forgotten = (
                _deals(sampler)
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


def _deals(sampler: Any) -> bool:
    """Whether the sampler gives each rank a different part."""
    return isinstance(getattr(sampler, "num_replicas", None), int) and hasattr(sampler, "rank")


@contextmanager
def _keyed(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    with randomness.preserved(), ExitStack() as later:
        key = randomness.sampler(seed, epoch)
        attributes = [
            value
            for each in (sampler, getattr(sampler, "sampler", None))
            for value in getattr(each, "__dict__", {}).values()
        ]
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
    """Return `values` as int64, shape [len(values)]. Raises UsageError, naming place and value, for
    a value that is no int, negative, or not below `length`.
    """
    if {type(value) for value in values} != {int}:
        values = [_int(name, place, value) for place, value in enumerate(values)]
    limit = 2**63 if length is None else length
    if min(values) < 0 or max(values) >= limit:
        place = next(place for place, value in enumerate(values) if not 0 <= value < limit)
        known = "0 or more" if length is None and values[place] < 0 else f"in [0, {limit})"
        raise UsageError("not-an-index", name=name, value=values[place], place=place, range=known)
    return np.array(values, dtype=np.int64)


def _int(name: str, place: int, value: Any) -> int:
    try:
        if not isinstance(value, (bool, np.bool_)):
            return int(value.__index__())
    except (AttributeError, TypeError):
        pass
    raise UsageError("not-an-index", name=name, value=value, place=place, range="a whole number")


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
        self._asked = KeyedSampler(sampler, seed)
        self._length, self.seed = length, seed
        self._kept = -1, indices(self._asked.name, [0], None)
        self.samples = 0
        self.samples = self._epoch(0).size
        self._first = self.digest(0)

    def at(self, epoch: int, positions: Indices) -> Indices:
        return self._epoch(epoch)[positions]

    def digest(self, epoch: int) -> str:
        """Return the SHA-256, in hex, of the epoch's indices. All ranks must have the same one,
        else they train on different orders.
        """
        return digest(self._epoch(epoch))

    def fingerprint(self) -> str:
        return (
            f"sampler {self._asked.name}, {self.samples} samples, epoch 0 {self._first[:16]}, seed"
            f" {self.seed}"
        )

    def _epoch(self, epoch: int) -> Indices:
        if self._kept[0] != epoch:
            found = indices(self._asked.name, self._asked.epoch(epoch), self._length)
            if self.samples and found.size != self.samples:
                raise UsageError(
                    "epochs-of-other-length",
                    sampler=self._asked.name,
                    first=self.samples,
                    count=int(found.size),
                    epoch=epoch,
                )
            self._asked.same(epoch, digest(found))
            self._kept = epoch, found
        return self._kept[1]


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
        self._asked = KeyedSampler(batch_sampler, seed)
        self._length, self.seed = length, seed
        self._kept: tuple[int, list[Indices], str] = -1, [], ""
        self._first = self.digest(0)

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
        return f"batches of {self._asked.name}, epoch 0 {self._first[:16]}, seed {self.seed}"

    def _epoch(self, epoch: int) -> tuple[int, list[Indices], str]:
        if self._kept[0] != epoch:
            found = [
                self._checked(epoch, number, batch)
                for number, batch in enumerate(self._asked.epoch(epoch))
            ]
            sizes = np.array([batch.size for batch in found], dtype=np.int64)
            self._kept = (
                epoch,
                found,
                self._asked.same(epoch, digest(np.concatenate([sizes, *found]))),
            )
        return self._kept

    def _checked(self, epoch: int, number: int, batch: Sequence[int]) -> Indices:
        name = f"{self._asked.name}, batch {number} of epoch {epoch},"
        if not hasattr(batch, "__iter__"):
            raise UsageError("not-a-batch", name=name, value=batch)
        if not (values := list(batch)):
            raise UsageError("not-a-batch", name=name, value=values)
        return indices(name, values, self._length)
