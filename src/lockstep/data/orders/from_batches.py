"""A user's own torch BatchSampler as micro-batches: one list of lists an epoch, the same on
every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.data.orders.asked import Asked, indices
from lockstep.data.orders.numbers import digest
from lockstep.data.permutation import Indices
from lockstep.errors import UsageError


class FromBatches:
    """The micro-batches that `batch_sampler` yields, asked for once an epoch and kept while it
    lasts; their number may change.

    Randomness and `set_epoch` as in FromSampler. A torch BatchSampler around a sampler that deals
    out samples to ranks cuts the order of all of them, without padding. One that deals out batches
    itself gives all ranks' in turn, padding included: a repeated sample in a batch cannot be told
    from one that is meant. `length` is the data set's, for the check of the indices.

    Raises:
        UsageError: an empty batch, what is no list of indices, an index that is no whole number or
            outside the data set, an epoch without batches, a sampler that yields something else
            when it is asked for the same epoch again.
    """

    def __init__(
        self, batch_sampler: Iterable[Sequence[int]], *, length: int | None = None, seed: int = 0
    ) -> None:
        self._asked = Asked(batch_sampler, seed)
        self._length, self.seed = length, seed
        self._kept: tuple[int, list[Indices], str] = -1, [], ""
        self._first = self.digest(0)

    def count(self, epoch: int) -> int:
        return len(self._epoch(epoch)[1])

    def batch(self, epoch: int, number: int) -> Indices:
        return self._epoch(epoch)[1][number].copy()

    def digest(self, epoch: int) -> str:
        """SHA-256, in hex, of the epoch's batches and where each ends: equal on all ranks, or
        they do not train on the same ones.
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
