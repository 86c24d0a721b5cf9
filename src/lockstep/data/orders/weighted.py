"""Samples drawn in proportion to weights. With replacement, each position is drawn by itself;
without, each epoch has its own permutation.
"""

from __future__ import annotations

import numpy as np

from lockstep.config.knob import whole
from lockstep.data.orders import numbers
from lockstep.data.orders.numbers import Numbers, short
from lockstep.data.permutation import Indices
from lockstep.errors import UsageError
from lockstep.runtime import randomness


class Weighted:
    """Draws sample i with probability weights[i] / sum(weights), as a function of (seed, epoch,
    position).

    With replacement, every position is an independent draw: a keyed uniform number is looked up in
    the cumulative sum. Without replacement, every sample gets the key -log(u) / weight, and the
    smallest keys come first (Efraimidis and Spirakis, Information Processing Letters 97, 2006). A
    sample of weight 0 never comes. The epoch's permutation takes 8 bytes a sample.

    Args:
        weights: one for each sample, shape [n].
        samples: positions of an epoch. Default: the number of weights; without replacement, of
            positive weights.
        replacement: whether a sample may come several times in an epoch.
        seed: keys the draws.

    Raises:
        UsageError: a weight that is negative or not finite, only zeros, or, without replacement,
            more samples than positive weights.
    """

    def __init__(
        self, weights: Numbers, *, samples: int | None = None, replacement: bool = True, seed: int
    ) -> None:
        self._weights = numbers.weights(weights)
        positive = int(np.count_nonzero(self._weights))
        if samples is None:
            samples = self._weights.size if replacement else positive
        self.samples = whole("samples", samples)
        if not replacement and self.samples > positive:
            raise UsageError("more-draws-than-weights", samples=self.samples, positive=positive)
        self.replacement = replacement
        self.seed = seed
        self._sums = np.cumsum(self._weights)
        self._last = int(np.flatnonzero(self._weights)[-1])
        self._drawn: tuple[int, Indices] | None = None

    def at(self, epoch: int, positions: Indices) -> Indices:
        key = randomness.order(self.seed, epoch)
        if self.replacement:
            sums = randomness.uniforms(key, positions) * self._sums[-1]
            samples = np.searchsorted(self._sums, sums, side="right")
            # rounding may make the product equal to the whole sum
            return np.asarray(np.minimum(samples, self._last), dtype=np.int64)
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._draw(key)
        return self._drawn[1][positions]

    def _draw(self, key: int) -> Indices:
        candidates = np.flatnonzero(self._weights)
        # the logarithm of the keys has the same order as the keys
        uniforms = randomness.uniforms(key, candidates)
        keys = np.log(-np.log(uniforms)) - np.log(self._weights[candidates])
        smallest = np.argsort(keys, kind="stable")[: self.samples]
        return candidates[smallest].astype(np.int64)

    def fingerprint(self) -> str:
        how = "with" if self.replacement else "without"
        return (
            f"weighted {how} replacement, {self.samples} samples of weights {short(self._weights)},"
            f" seed {self.seed}"
        )
