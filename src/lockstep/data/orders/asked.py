"""A user's sampler, asked for an epoch: under keyed randomness, for all ranks at once, and leaving
no trace in the caller's streams.

A sampler that deals out samples to ranks is asked once for each rank, and what they got is put
together again:

    rank 0   4 1 5              4 2 | 1 0 | 5 4         the last of them is padding: 5 samples
    rank 1   2 0 4
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from lockstep.errors import UsageError
from lockstep.runtime import randomness

_NOBODY = object()


class Asked:
    """Answers with a list of what `sampler` yields in an epoch, a function of (seed, epoch) as far
    as its randomness can be keyed.

    Keyed are torch's, numpy's and `random`'s global generators, and any generator of these three
    kinds that the sampler, or the sampler in it, keeps in an attribute. `set_epoch` is called where
    there is one. What remembers more than that is found out by `same`, when an epoch is asked for
    again.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.name = type(sampler).__name__
        if isinstance(sampler, Iterator) and iter(sampler) is sampler:
            # any other one may draw as soon as it is asked
            raise UsageError("sampler-used-up", sampler=self.name)
        self._sampler, self._seed = sampler, seed
        self._digests: dict[int, str] = {}
        self._reminded = False

    def epoch(self, epoch: int) -> list[Any]:
        """What the sampler yields. Raises UsageError where that is nothing."""
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
        """`digest`, of this epoch. Raises UsageError where it was another one before."""
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
        # padding can be told in a list of samples only
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
                    f"{type(sampler).__name__}.set_epoch({epoch}) was not called, and without it"
                    " every epoch has the same order: calling it for you, now and in later epochs",
                    stacklevel=4,
                )


def _deals(sampler: Any) -> bool:
    """Whether it gives each rank another part."""
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
    """`values` as int64, shape [len(values)]. Raises UsageError for what is no int, negative, or
    not below `length`, naming place and value.
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
