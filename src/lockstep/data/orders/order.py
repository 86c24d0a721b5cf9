"""What an order is: which sample stands at position p of epoch e. A function, not a list, and
the same one on every rank; and the two plain ones.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from lockstep.data.permutation import Indices, Permutation
from lockstep.runtime import randomness


@runtime_checkable
class Order(Protocol):
    """All epochs, position by position; a Loader cuts the positions into micro-batches."""

    samples: int
    """Positions of an epoch. Samples may be left out and repeated: what stands at a position is
    the order's affair.
    """

    def at(self, epoch: int, positions: Indices) -> Indices:
        """The indices of the samples at `positions` (each in [0, samples)) of an epoch; int64,
        same shape.
        """
        ...

    def fingerprint(self) -> str:
        """What tells this order from others, to be kept with a checkpoint."""
        ...


@runtime_checkable
class Batches(Protocol):
    """All epochs, micro-batch by micro-batch: an order that decides also what goes together
    (sequences of similar length).
    """

    def count(self, epoch: int) -> int:
        """Micro-batches of an epoch, at least 1."""
        ...

    def batch(self, epoch: int, number: int) -> Indices:
        """The indices of the samples of micro-batch `number`, 0 <= number < count(epoch); int64,
        shape [samples], never empty.
        """
        ...

    def fingerprint(self) -> str:
        """What tells these batches from others, to be kept with a checkpoint."""
        ...


class Sequential:
    """Every epoch in the order of the data set."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def at(self, epoch: int, positions: Indices) -> Indices:
        return positions.astype(np.int64)

    def fingerprint(self) -> str:
        return f"sequential, {self.samples} samples"


class Shuffled:
    """Another permutation every epoch, a function of (seed, epoch) alone.

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
