"""What an order is: a function, not a list, that returns the sample at position p of epoch e. It is
the same on every rank. Also the orders that are made of permutations.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from lockstep.config.knob import whole
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


class BlockShuffled:
    """Every sample once an epoch: blocks of neighbours in permuted order, permuted within each
    block. For data that is stored in shards on disk.

    10 samples in blocks of 4:      0 1 2 3 | 4 5 6 7 | 8 9
    blocks permuted:                8 9 | 0 1 2 3 | 4 5 6 7
    samples within each, too:       9 8 | 2 0 3 1 | 4 7 5 6

    Use it if neighbours are cheap to read together. No list is stored. If `block` does not divide
    `samples`, the last block of the data set is shorter; it may come anywhere in the epoch. Each
    block in a call costs about 30 microseconds, so ask for neighbouring positions together.

    Args:
        samples: the number of samples in the data set.
        block: samples of a block.
        seed: keys the permutations.

    Raises:
        UsageError: fewer than one sample, or a block of fewer than one.
    """

    def __init__(self, samples: int, block: int, seed: int) -> None:
        self.samples = whole("samples", samples)
        self.block = whole("block", block)
        self.seed = seed
        self._blocks = -(-self.samples // self.block)
        self._last = self.samples - (self._blocks - 1) * self.block  # samples of the last block

    def at(self, epoch: int, positions: Indices) -> Indices:
        key = randomness.order(self.seed, epoch)
        blocks = Permutation(self._blocks, key)
        last = self._blocks - 1
        # the turn of the shorter last block in the permuted order
        short = int(blocks.inverse(np.array([last], dtype=np.int64))[0])
        behind = positions >= short * self.block + self._last
        # the position if that block were a full one
        padded = positions + behind * (self.block - self._last)
        turn = padded // self.block
        offset = padded - turn * self.block
        block_of = blocks(turn)
        samples = np.empty_like(padded)
        for block in np.unique(block_of).tolist():
            inside = block_of == block
            size = self._last if block == last else self.block
            permutation = Permutation(size, randomness.derive(key, block))
            samples[inside] = block * self.block + permutation(offset[inside])
        return samples

    def fingerprint(self) -> str:
        return (
            f"shuffled in blocks of {self.block} (permutation 1), {self.samples} samples, seed"
            f" {self.seed}"
        )
