"""A shuffled order as a function: a keyed permutation of [0, n) that answers for any position without having stored the others.

Up to a few thousand elements the order is that of keyed hashes, which is a uniformly random permutation. Beyond, it is a Feistel
network on the smallest number of bits that holds n - 1, halves of unequal width allowed: each round changes one half by a keyed
function of the other, which can be undone, so the whole is a bijection of 2^bits < 2n elements. What falls outside [0, n) is sent
through again (cycle walking: Black and Rogaway, CT-RSA 2002), less than twice on average.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UsageError
from lockstep.randomness import derive

Indices = NDArray[np.int64]

_SMALL = 4096
_ROUNDS = 6
_LARGEST = 2**62
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Permutation:
    """A permutation of [0, n), 1 <= n <= 2^62, chosen by `key`. Memory does not grow with n."""

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= _LARGEST:
            raise UsageError(f"n={n}: a permutation has between 1 and 2^62 elements")
        self.n = n
        self._key = key
        bits = (n - 1).bit_length()
        self._low = bits - bits // 2  # width of the low half; the high half has as many bits or one fewer
        self._high = bits // 2
        self._rounds = [np.uint64(derive(key, number)) for number in range(_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        """The elements at `positions`, each in [0, n); int64, same shape."""
        self._check(positions)
        if self.n <= _SMALL:
            return _by_hash(self.n, self._key)[0][positions]
        return self._walk(positions, range(_ROUNDS))

    def inverse(self, elements: Indices) -> Indices:
        """The positions of `elements`."""
        self._check(elements)
        if self.n <= _SMALL:
            return _by_hash(self.n, self._key)[1][elements]
        return self._walk(elements, range(_ROUNDS - 1, -1, -1))

    def _check(self, values: Indices) -> None:
        if values.size and not (values.min() >= 0 and values.max() < self.n):
            raise UsageError(f"positions from {values.min()} to {values.max()} do not lie in [0, {self.n})")

    def _walk(self, values: Indices, rounds: range) -> Indices:
        found = self._network(values.astype(np.uint64), rounds)
        outside = np.flatnonzero(found.ravel() >= self.n)
        flat = found.ravel()
        while outside.size:
            flat[outside] = again = self._network(flat[outside], rounds)
            outside = outside[again >= self.n]
        return flat.reshape(values.shape).astype(np.int64)

    def _network(self, values: NDArray[np.uint64], rounds: range) -> NDArray[np.uint64]:
        low_width = np.uint64(self._low)
        high, low = values >> low_width, values & np.uint64(2**self._low - 1)
        for number in rounds:
            if number % 2:
                low ^= self._scramble(high, number, self._low)
            else:
                high ^= self._scramble(low, number, self._high)
        return (high << low_width) | low

    def _scramble(self, half: NDArray[np.uint64], number: int, width: int) -> NDArray[np.uint64]:
        """`width` well mixed bits of a half and this round's key: the upper ones of two multiplications."""
        mixed = (half ^ self._rounds[number]) * _M1
        mixed ^= mixed >> np.uint64(32)
        mixed *= _M2
        mixed >>= np.uint64(64 - width)
        return mixed


@lru_cache(maxsize=8)
def _by_hash(n: int, key: int) -> tuple[Indices, Indices]:
    """The permutation that sorts keyed hashes of 0 .. n - 1, and its inverse."""
    hashes = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(derive(key, 0))
    for shift, factor in ((30, _M1), (27, _M2)):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * factor
    order = np.argsort(hashes ^ (hashes >> np.uint64(31)), kind="stable").astype(np.int64)
    return order, np.argsort(order).astype(np.int64)
