"""A user's own torch Sampler as an order: one list an epoch, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.data.orders.asked import Asked, indices
from lockstep.data.orders.numbers import digest
from lockstep.data.permutation import Indices
from lockstep.errors import UsageError


class FromSampler:
    """The indices that `sampler` yields, as many in every epoch as in the first, asked for once an
    epoch and kept while it lasts.

    Its randomness is keyed by (seed, epoch), the caller's streams are left as they were, and
    `set_epoch` is called where there is one. A sampler that deals out samples to ranks (torch's
    DistributedSampler, and ours) gives the order of all of them, without padding. `length` is the
    data set's, for the check of the indices. The sampler is asked for epoch 0 at once, for its
    number of samples.

    Raises:
        UsageError: an index that is no whole number or outside the data set, an epoch that is empty
            or has another number of indices, a sampler that yields something else when it is asked
            for the same epoch again.
    """

    def __init__(self, sampler: Iterable[int], *, length: int | None = None, seed: int = 0) -> None:
        self._asked = Asked(sampler, seed)
        self._length, self.seed = length, seed
        self._kept = -1, indices(self._asked.name, [0], None)
        self.samples = 0
        self.samples = self._epoch(0).size
        self._first = self.digest(0)

    def at(self, epoch: int, positions: Indices) -> Indices:
        return self._epoch(epoch)[positions]

    def digest(self, epoch: int) -> str:
        """SHA-256, in hex, of the epoch's indices: equal on all ranks, or they do not train on
        the same order.
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
