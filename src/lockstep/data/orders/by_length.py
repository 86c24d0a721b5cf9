"""Micro-batches of samples of similar length, each with as many samples as a budget of tokens
allows. There is little padding, and all micro-batches take about the same time.

lengths  3 9 4 8 3 9 4 3 9      tokens 18, boundaries 4, 9
bucket up to 4:   3 4 3 4 3     longest: 4, so 18 // 4 = 4 samples a micro-batch: 1 full, 1 short
bucket up to 9:   9 8 9 9       longest: 9, so 18 // 9 = 2 samples a micro-batch: 2 full
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lockstep.config.knob import whole
from lockstep.data.orders import numbers
from lockstep.data.orders.numbers import Numbers, short
from lockstep.data.permutation import Indices, Permutation
from lockstep.errors import UsageError
from lockstep.runtime import randomness

# ratio of one default boundary to the one before: in a bucket, padding is at most about an eighth
# of a sample's length
_GROWTH = 1.125


class ByLength:
    """Micro-batches of sequences of similar length, with at most `tokens` padded tokens each.

    A bucket has the samples that are longer than the boundary before it, up to its own boundary.
    Samples longer than the last boundary are one more bucket. A micro-batch has samples of one
    bucket: their number times the bucket's longest length is at most `tokens`. A sample longer than
    half of `tokens` is a micro-batch alone.

    Every epoch permutes the samples within a bucket, and the full micro-batches of all buckets.
    Each has nearly `tokens` tokens, so that ranks have equal work. The short micro-batches, at most
    one a bucket, come last, the largest first. Spread out, each would leave all other ranks of its
    step waiting. The number of micro-batches is the same in every epoch.

    Args:
        lengths: the length of each sample in tokens, shape [n].
        tokens: the largest number of padded tokens in a micro-batch.
        seed: keys the permutations.
        boundaries: lengths at which buckets end, in increasing order. Default: each an eighth
            longer than the one before, from the shortest length to the longest.

    Raises:
        UsageError: a length that is no whole number, below 1, or above `tokens`; boundaries that do
            not grow.
    """

    def __init__(
        self, lengths: Numbers, tokens: int, *, seed: int, boundaries: Sequence[int] | None = None
    ) -> None:
        self._lengths = numbers.lengths(lengths, 1)
        self.tokens = whole("tokens", tokens)
        self.seed = seed
        longest = int(self._lengths.argmax())
        if self._lengths[longest] > self.tokens:
            raise UsageError(
                "sample-too-long",
                sample=longest,
                length=int(self._lengths[longest]),
                tokens=self.tokens,
            )
        self.boundaries = _geometric(self._lengths) if boundaries is None else _growing(boundaries)
        bucket = np.searchsorted(self.boundaries, self._lengths, side="left")
        by_bucket = np.argsort(bucket, kind="stable").astype(np.int64)
        # one array of samples for each bucket that has any
        self._members = np.split(by_bucket, np.flatnonzero(np.diff(bucket[by_bucket])) + 1)
        longest_of = np.array([int(self._lengths[members].max()) for members in self._members])
        self._sizes = self.tokens // longest_of
        counts = np.array([members.size for members in self._members])
        self._full = np.cumsum(counts // self._sizes)
        left = counts % self._sizes  # samples of each bucket's short micro-batch
        ragged = np.flatnonzero(left)
        largest_first = np.argsort(-(left * longest_of)[ragged], kind="stable")
        self._short = ragged[largest_first]

    def count(self, epoch: int) -> int:
        return int(self._full[-1]) + self._short.size

    def batch(self, epoch: int, number: int) -> Indices:
        if not 0 <= number < self.count(epoch):
            raise UsageError("outside-order", name="number", value=number, count=self.count(epoch))
        key = randomness.order(self.seed, epoch)
        full = int(self._full[-1])
        if number >= full:
            bucket = int(self._short[number - full])
            chunk = self._members[bucket].size // int(self._sizes[bucket])
        else:
            drawn = int(Permutation(full, key)(np.array([number], dtype=np.int64))[0])
            bucket = int(np.searchsorted(self._full, drawn, side="right"))
            before = int(self._full[bucket - 1]) if bucket else 0
            chunk = drawn - before
        members = self._members[bucket]
        begin = chunk * int(self._sizes[bucket])
        end = min(begin + int(self._sizes[bucket]), members.size)
        permutation = Permutation(members.size, randomness.derive(key, bucket))
        return members[permutation(np.arange(begin, end, dtype=np.int64))]

    def fingerprint(self) -> str:
        return (
            f"by length (permutation 1), {self._lengths.size} samples, {self.tokens} tokens,"
            f" lengths {short(self._lengths)}, boundaries {short(self.boundaries)},"
            f" seed {self.seed}"
        )


def _geometric(lengths: Indices) -> Indices:
    edge = int(lengths.min())
    longest = int(lengths.max())
    edges = [edge]
    while edge < longest:
        edge = max(edge + 1, int(edge * _GROWTH))
        edges.append(min(edge, longest))
    return np.array(edges, dtype=np.int64)


def _growing(boundaries: Sequence[int]) -> Indices:
    edges = [whole(f"boundaries[{index}]", edge) for index, edge in enumerate(boundaries)]
    for number, (before, edge) in enumerate(pairwise(edges), start=1):
        if edge <= before:
            raise UsageError("boundaries-not-growing", number=number, value=edge, before=before)
    return np.array(edges, dtype=np.int64)
