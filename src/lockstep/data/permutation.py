"""A shuffled order as a function: a keyed permutation of [0, n) that computes any position without
storing the others.

Up to 4096 elements, the elements are sorted by keyed hashes, which gives a uniformly random
permutation. For larger n, the positions form a table of `rows` x `columns`, the smallest
near-square one that holds n, and go through a Feistel network. Each round shifts one coordinate,
modulo its side, by a keyed function of the other coordinate. A shift can be undone, so the network
permutes the table.

        position = row * columns + column
        even rounds     row    += f(column)  mod rows
        odd rounds      column += f(row)     mod columns

The table has fewer than sqrt(n) + 1 places beyond n. A position that lands on one of them goes
through the network again (cycle walking: Black and Rogaway, CT-RSA 2002). The usual form, with
halves of a bit string, needs up to twice n places and as many tries.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lockstep.config.knob import number, whole
from lockstep.errors import UsageError
from lockstep.runtime.randomness import derive

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

_SMALL = 4096
# 4 rounds can be told from chance after about sqrt(n) elements (Patarin, Asiacrypt 2001)
_ROUNDS = 6
_LARGEST = 2**62
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64's
_HALF = np.uint64(32)


class Permutation:
    """A permutation of [0, n), 1 <= n <= 2^62, chosen by `key`. Memory does not grow with n.
    Raises UsageError for another n.
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n = whole("n", n, -math.inf)
        number("n", n, least=1, most=_LARGEST)
        self._key = key
        rows = math.isqrt(n - 1) + 1
        # each at most 2^31, so that no sum or product below overflows
        self._sides = np.uint64(rows), np.uint64(-(-n // rows))
        self._rounds = [np.uint64(derive(key, turn)) for turn in range(_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        """Return the elements at `positions`, each in [0, n); int64, same shape. Raises UsageError
        for positions outside.
        """
        self._check("positions", positions)
        if self.n <= _SMALL:
            return _by_hash(self.n, self._key)[0][positions]
        return self._walk(positions, forward=True)

    def inverse(self, elements: Indices) -> Indices:
        """Return the positions of `elements`; int64, same shape. Raises UsageError for elements
        outside [0, n).
        """
        self._check("elements", elements)
        if self.n <= _SMALL:
            return _by_hash(self.n, self._key)[1][elements]
        return self._walk(elements, forward=False)

    def _check(self, name: str, values: Indices) -> None:
        if values.size and not (values.min() >= 0 and values.max() < self.n):
            raise UsageError(
                "outside-order", name=name, value=f"{values.min()}..{values.max()}", count=self.n
            )

    def _walk(self, values: Indices, *, forward: bool) -> Indices:
        words = self._network(values.astype(np.uint64).ravel(), forward)
        outside = np.flatnonzero(words >= self.n)
        while outside.size:
            again = self._network(words[outside], forward)
            words[outside] = again
            outside = outside[again >= self.n]
        return words.view(np.int64).reshape(values.shape)

    def _network(self, values: _Words, forward: bool) -> _Words:
        rows, columns = self._sides
        row = values // columns
        column = values - row * columns
        turns = range(_ROUNDS) if forward else range(_ROUNDS - 1, -1, -1)
        for turn in turns:
            if turn % 2:
                _shift(column, self._amount(row, turn, columns), columns, forward)
            else:
                _shift(row, self._amount(column, turn, rows), rows, forward)
        row *= columns
        row += column
        return row

    def _amount(self, other: _Words, turn: int, side: np.uint64) -> _Words:
        """Return numbers in [0, side) from the other coordinate and this round's key: the upper 32
        bits of a well mixed word, scaled.
        """
        mixed = (other ^ self._rounds[turn]) * _M1
        mixed ^= mixed >> _HALF
        mixed *= _M2
        mixed >>= _HALF
        mixed *= side
        mixed >>= _HALF
        return mixed


def _shift(coordinate: _Words, amount: _Words, side: np.uint64, forward: bool) -> None:
    """Add `amount` modulo `side` in place, or subtract it. Of the two candidates the smaller one is
    right: the other is too large or has wrapped around.
    """
    if forward:
        coordinate += amount
        np.minimum(coordinate, coordinate - side, out=coordinate)
    else:
        coordinate -= amount
        np.minimum(coordinate, coordinate + side, out=coordinate)


@lru_cache(maxsize=8)
def _by_hash(n: int, key: int) -> tuple[Indices, Indices]:
    """Return the permutation that sorts keyed hashes of 0 .. n - 1, and its inverse."""
    hashes = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes += np.uint64(derive(key, 0))
    for shift, factor in ((30, _M1), (27, _M2)):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * factor
    order = np.argsort(hashes ^ (hashes >> np.uint64(31)), kind="stable").astype(np.int64)
    return order, np.argsort(order).astype(np.int64)
