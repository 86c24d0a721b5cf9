"""What an order is: a function, not a list, that returns the sample at position p of epoch e. It is
the same on every rank. Also the two simplest orders.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from lockstep.data.permutation import Indices, Permutation
from lockstep.runtime import randomness


@runtime_checkable
class Order(Protocol):
    """The sample at each position of each epoch. A Loader cuts the positions into micro-batches."""

    samples: int
    """Number of positions in an epoch. The order may leave out samples and repeat others."""

    def at(self, epoch: int, positions: Indices) -> Indices:
        """Return the indices of the samples at `positions` (each in [0, samples)) of an epoch;
        int64, same shape.
        """
        ...

    def fingerprint(self) -> str:
        """Return a text that differs from that of any other order. Checkpoints keep it."""
        ...


@runtime_checkable
class Batches(Protocol):
    """The samples of each micro-batch of each epoch: an order that also decides which samples are
    together (for example, sequences of similar length).
    """

    def count(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch, at least 1."""
        ...

    def batch(self, epoch: int, number: int) -> Indices:
        """Return the sample indices of micro-batch `number`, 0 <= number < count(epoch); int64,
        shape [samples], never empty.
        """
        ...

    def fingerprint(self) -> str:
        """Return a text that differs from that of any other batches. Checkpoints keep it."""
        ...


class Sequential:
    """The order of the data set, in every epoch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def at(self, epoch: int, positions: Indices) -> Indices:
        return positions.astype(np.int64)

    def fingerprint(self) -> str:
        return f"sequential, {self.samples} samples"


class Shuffled:
    """A different permutation in every epoch, which depends only on (seed, epoch).

    Args:
        samples: the number of samples in the data set.
        seed: keys the permutations.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self._permutation: tuple[int, Permutation] | None = None

    def at(self, epoch: int, positions: Indices) -> Indices:
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, Permutation(self.samples, randomness.order(self.seed, epoch))
        return self._permutation[1](positions)

    def fingerprint(self) -> str:
        return f"shuffled (permutation 1), {self.samples} samples, seed {self.seed}"
