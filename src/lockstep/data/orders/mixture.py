"""Several data sets mixed in given shares, which hold not only on average but in every stretch.

The positions of all epochs form one line, cut into periods. A period holds component c exactly
`counts[c]` times, in an order drawn for this period. So the number of a component's draws before
any period is known without walking there. The n-th draw of a component is the n-th element of its
own permutations, one after the other:

    weights 2:1:1                | A B A C | C A A B | B A C A |   one period is 4 positions
    component B, 2 samples             b1          b0   b0         its third draw begins its second
                                                                   permutation
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.config.knob import whole
from lockstep.data.orders import numbers
from lockstep.data.orders.numbers import Numbers, short
from lockstep.data.permutation import Indices, Permutation
from lockstep.errors import UsageError
from lockstep.runtime import randomness

_LONGEST = 4096  # positions of a period
# a share may differ by a thousandth from the requested one; the shortest such period is taken
_CLOSE = 1e-3
_AT_ONCE = 1 << 20  # largest number of places that are drawn together


class Mixture:
    """A mixture of data sets: indices into a torch ConcatDataset of them, in the shares of
    `weights`.

    Each component goes through its own permutations, over all epochs. None of its samples comes a
    second time before all have come once. So a small component is repeated, and a large one
    continues in the next epoch where it stopped.

    The shares are those of a period of at most 4096 positions. It is the shortest period in which
    all shares are right to a thousandth. If there is none, it is the longest, rounded by largest
    remainder, with at least one position for each positive weight. In any stretch the count of a
    component differs from its share by less than its count in two periods.

    Args:
        lengths: the length of each data set.
        weights: the share of each data set, in any unit.
        samples: positions of an epoch. Default: the sum of the lengths.
        seed: keys the permutations.

    Raises:
        UsageError: lists of different lengths, a weight that is negative or not finite, only zeros,
            a positive weight below 1/4096 of the sum, or an empty data set of positive weight.
    """

    def __init__(
        self, lengths: Numbers, weights: Numbers, *, samples: int | None = None, seed: int
    ) -> None:
        self._lengths = numbers.lengths(lengths, 0)
        self._weights = numbers.weights(weights)
        _check(self._lengths, self._weights)
        self.samples = int(self._lengths.sum()) if samples is None else whole("samples", samples)
        self.seed = seed
        self.counts = period_counts(self._weights)
        self._period = int(self.counts.sum())
        self._edges = np.cumsum(self.counts)
        self._starts = np.cumsum(self._lengths) - self._lengths

    def at(self, epoch: int, positions: Indices) -> Indices:
        line = positions.astype(np.int64).ravel() + epoch * self.samples
        periods, row = np.unique(line // self._period, return_inverse=True)
        column = line % self._period
        component = np.empty_like(line)
        draw = np.empty_like(line)
        step = max(1, _AT_ONCE // self._period)
        for first in range(0, periods.size, step):
            components, draws = self._drawn(periods[first : first + step])
            inside = (row >= first) & (row < first + step)
            cell = row[inside] - first, column[inside]
            component[inside] = components[cell]
            draw[inside] = draws[cell]
        return self._samples(component, draw).reshape(positions.shape)

    def _drawn(self, periods: Indices) -> tuple[Indices, Indices]:
        """Return the component at each place of these periods, and the number of its draw, counted
        from 0 over all epochs; int64, shape [periods, places].
        """
        places = periods[:, None] * self._period + np.arange(self._period, dtype=np.int64)
        uniforms = randomness.uniforms(randomness.order(self.seed, 0), places)
        turns = np.argsort(uniforms, axis=1, kind="stable")
        components = np.searchsorted(self._edges, turns, side="right").astype(np.int64)
        draws = np.empty_like(components)
        for number, count in enumerate(self.counts.tolist()):
            here = components == number
            numbered = np.cumsum(here, axis=1) - 1 + periods[:, None] * count
            draws[here] = numbered[here]
        return components, draws

    def _samples(self, component: Indices, draw: Indices) -> Indices:
        cycle, position = np.divmod(draw, self._lengths[component])
        samples = np.empty_like(draw)
        for number, times in np.unique(np.stack([component, cycle]), axis=1).T.tolist():
            here = (component == number) & (cycle == times)
            key = randomness.component_key(self.seed, number, times)
            permutation = Permutation(int(self._lengths[number]), key)
            samples[here] = permutation(position[here]) + self._starts[number]
        return samples

    def fingerprint(self) -> str:
        return (
            f"mixture (permutation 1), {self.samples} samples of {self._lengths.size} components,"
            f" lengths {short(self._lengths)}, weights {short(self._weights)}, seed {self.seed}"
        )


def _check(lengths: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
    if lengths.size != weights.size:
        raise UsageError(
            "mixture-lists-differ", lengths=int(lengths.size), weights=int(weights.size)
        )
    empty = np.flatnonzero((lengths == 0) & (weights > 0))
    if empty.size:
        raise UsageError("component-empty", number=int(empty[0]))
    rare = np.flatnonzero((weights > 0) & (weights < weights.sum() / _LONGEST))
    if rare.size:
        share = weights[rare[0]] / weights.sum()
        raise UsageError(
            "weight-too-small", number=int(rare[0]), share=float(share), least=_LONGEST
        )


def period_counts(weights: NDArray[np.float64]) -> Indices:
    """Return how often each component comes in a period; int64, shape [components]."""
    shares = weights / weights.sum()
    periods = np.arange(1, _LONGEST + 1)
    quotas = shares * periods[:, None]
    counts = np.rint(quotas)
    close = (np.abs(counts - quotas) <= _CLOSE * quotas).all(axis=1)
    good = close & (counts.sum(axis=1) == periods)
    if good.any():
        return np.asarray(counts[np.argmax(good)], dtype=np.int64)
    least = np.where(shares > 0, np.maximum(np.floor(quotas[-1]), 1), 0)
    missing = int(_LONGEST - least.sum())
    least[np.argsort(least - quotas[-1], kind="stable")[:missing]] += 1
    return least.astype(np.int64)
