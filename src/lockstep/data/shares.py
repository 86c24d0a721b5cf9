"""How many of a step's micro-batches each rank computes, so that the slowest is done first: pure
functions of numbers.

seconds    that one micro-batch takes, by rank          1  1  1  3
16 of them, in shares                                   5  5  5  1      the step takes 5: rank 0 is done after 5 x 1, rank 3 after 1 x 3
evenly                                                  4  4  4  4      it would take 4 x 3
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def quickest(seconds: Sequence[float], slots: int) -> tuple[int, ...]:
    """How many of `slots` micro-batches each rank gets where one takes it `seconds` (inf: it gets
    none): the largest time is the least possible.

    Of shares that are equally good it is those in which the first ranks have more. Ranks of one
    speed share evenly.
    """
    rates = [1 / each for each in seconds]
    assert min(seconds) > 0, "a micro-batch takes some time"
    total = math.fsum(rates)
    assert total > 0, "somebody must compute"
    # nobody has less in the best shares: the rest is fewer than there are ranks
    counts = [int(slots * rate / total) for rate in rates]
    queue = [
        ((count + 1) * each, rank)
        for rank, (count, each) in enumerate(zip(counts, seconds, strict=True))
        if each < math.inf
    ]
    heapq.heapify(queue)
    for _ in range(slots - sum(counts)):
        _, rank = queue[0]
        counts[rank] += 1
        heapq.heapreplace(queue, ((counts[rank] + 1) * seconds[rank], rank))
    return tuple(counts)


def in_proportion(weights: Sequence[float], slots: int) -> tuple[int, ...]:
    """As if the weights were speeds; 0 gets none."""
    return quickest([math.inf if each == 0 else 1 / each for each in weights], slots)


def longest(seconds: Sequence[float], counts: Sequence[int]) -> float:
    """How long a step takes with these shares: the slowest rank's time."""
    return max(each * count for each, count in zip(seconds, counts, strict=True) if count)


def in_words(counts: Sequence[int]) -> str:
    """ "5, 5, 5, 1"; of many ranks, "5 (ranks 0-61), 1 (rank 62)"."""
    if len(counts) <= 8:
        return ", ".join(map(str, counts))
    found: list[tuple[int, int, int]] = []  # count, first rank, last
    for rank, count in enumerate(counts):
        first = found.pop()[1] if found and found[-1][0] == count else rank
        found.append((count, first, rank))
    return ", ".join(
        f"{count} ({f'ranks {first}-{last}' if last > first else f'rank {first}'})"
        for count, first, last in found
    )
