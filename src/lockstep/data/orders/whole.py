"""Every sample once an epoch: in the data set's own order, or in another permutation each time."""

from __future__ import annotations

import numpy as np

from lockstep.data.permutation import Indices, Permutation
from lockstep.runtime import randomness


class Sequential:
    """Every epoch in the order of the data set."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def at(self, epoch: int, positions: Indices) -> Indices:
        return positions.astype(np.int64)

    def fingerprint(self) -> str:
        return f"sequential, {self.samples} samples"


class Shuffled:
    """Another permutation every epoch, a function of (seed, epoch) alone."""

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
