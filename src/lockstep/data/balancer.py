"""Shares that follow measured speed: what the ranks' work has taken comes in, who computes how many
of the next window's micro-batches goes out.

    window   k - 1   k        k + 1
    work     ######  ######                what a micro-batch took each rank in k - 1 travels with the facts of step k (a GPU may tell it later),
    noted            ^ k - 1               so that all ranks know the same numbers when k is over,
    decided                   ^            and decide the same for k + 1, without a message of their own

No clock and no rank of its own: a function of what was noted, whose decisions are the same on every
rank.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lockstep.errors import UsageError

WARM_UP = 2
"""Steps that say nothing: memory is allocated, kernels are chosen, caches are cold."""
LATE = 2
"""Steps after a move in which what is noted is still of a step before it."""
MEASURED, REMEMBERED = 5, 20
"""Steps since the last move that it takes to decide, and of which the median counts at most: one
that was held up does not.
"""
GAIN, DOUBT = 0.05, 0.5
"""Of a step's time, what a move must promise: GAIN + DOUBT / steps. What loader workers fetched
ahead is lost, a step at most, which is earned back in 20; and what is known from few steps may
be chance.
"""
TRIAL = 0.01
"""Of the time, what trials of ranks that have nothing to do may cost."""
MOST_PATIENCE = 320
"""Steps between two moves where moves do not bring what they promise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewShares:
    """New shares, and why."""

    by_rank: tuple[int, ...]
    """Micro-batches of a full step."""
    seconds: tuple[float, ...]
    """That one takes, as far as is known."""
    why: str

    def __str__(self) -> str:
        return f"micro-batches by rank: {in_words(self.by_rank)} ({self.why})"


class Balancer:
    """Of one Loader. `begin` opens every window in its order, `note` ends its step; both are
    called alike on all ranks.
    """

    def __init__(self, slots: int, size: int) -> None:
        each, more = divmod(slots, size)
        self.by_rank = tuple(each + (rank < more) for rank in range(size))
        """The shares of the window that was opened last, of a full step."""
        self._slots = slots
        self._open = False  # whether a window was handed out since the last step
        self._noted: list[float] | None = None  # of that window's step: seconds by rank
        self._steps = 0  # taken in
        self._since = 0  # of them, since the last move
        # seconds of a micro-batch, since the last move
        self._fresh: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(size)]
        self._known: list[float | None] = [None] * size  # the last that was known of each
        self._idle = [0] * size  # steps since it had something to do
        self._patience = MEASURED
        self._promise: _Promise | None = None  # of the last move

    def note(self, seconds: Sequence[float]) -> None:
        """The step of the window that is open is done. `seconds`: what a micro-batch took each
        rank lately (0: unknown); of several Steppers, added.
        """
        if len(seconds) != len(self.by_rank):
            raise UsageError("balance-of-other-ranks", loader=len(self.by_rank), step=len(seconds))
        self._noted = (
            list(seconds)
            if self._noted is None
            else [ours + more for ours, more in zip(self._noted, seconds, strict=True)]
        )

    def leave(self) -> None:
        """A walk begins: a window that was opened and whose step was not done, because its epoch
        was left there, is forgotten.
        """
        if self._noted is None:
            self._open = False

    def begin(self) -> NewShares | None:
        """The next window is opened: what has moved since the last one. Raises UsageError where
        the step of that one is not done.
        """
        if self._open:
            if self._noted is None:
                raise UsageError("window-before-step")
            self._take_in(self._noted)
        moved = self._decide()
        if moved is not None:
            self.by_rank, self._since = moved.by_rank, 0
            for fresh in self._fresh:
                fresh.clear()
        self._open, self._noted = True, None
        return moved

    def _take_in(self, noted: Sequence[float]) -> None:
        self._steps += 1
        self._since += 1
        for rank, (seconds, count) in enumerate(zip(noted, self.by_rank, strict=True)):
            self._idle[rank] = 0 if count else self._idle[rank] + 1
            if count and seconds > 0 and self._since > LATE and self._steps > WARM_UP + LATE:
                self._fresh[rank].append(seconds)
                self._known[rank] = median(self._fresh[rank])

    def _decide(self) -> NewShares | None:
        measured = min(map(len, self._of_busy()))
        if measured < MEASURED:
            return None
        known = [each for each in self._known if each is not None]
        # one that was never measured may be as fast as any
        seconds = tuple(min(known) if each is None else each for each in self._known)
        now = longest(seconds, self.by_rank)
        back = self._judge(now)
        if back is not None:
            return NewShares(
                by_rank=back,
                seconds=seconds,
                why="unchanged: other shares did not make a step faster",
            )
        if self._since < self._patience:
            return None
        best = quickest(seconds, self._slots)
        then = longest(seconds, best)
        if then < min((1 - GAIN - DOUBT / measured) * now, self._at_best()):
            self._promise = _Promise(self.by_rank, now, then)
            return NewShares(by_rank=best, seconds=seconds, why=_apart(seconds))
        for rank in range(len(seconds)):
            if self._worth_a_trial(rank, seconds, now):
                return NewShares(
                    by_rank=self._with_one(rank, seconds),
                    seconds=seconds,
                    why=f"rank {rank} had none, and gets one to be measured again",
                )
        return None

    def _of_busy(self) -> list[deque[float]]:
        """What is remembered of the ranks that have something to do."""
        return [fresh for fresh, count in zip(self._fresh, self.by_rank, strict=True) if count]

    def _at_best(self) -> float:
        """The slowest rank's time with the shares as they are, if its best steps were all: what
        noise could have made look longer.
        """
        best = [sorted(fresh)[len(fresh) // 4] for fresh in self._of_busy()]
        return longest(best, [count for count in self.by_rank if count])

    def _judge(self, now: float) -> tuple[int, ...] | None:
        """Whether the last move has brought what it promised; the shares of before, where a step is
        no shorter.

        Speeds may change with the shares (where ranks share cores, say), which would have these
        wander for ever: so it happens less and less often.
        """
        promise, self._promise = self._promise, None
        if promise is None:
            return None
        kept = now <= (promise.before + promise.then) / 2
        self._patience = MEASURED if kept else min(2 * self._patience, MOST_PATIENCE)
        return promise.by_rank if now >= promise.before else None

    def _worth_a_trial(self, rank: int, seconds: Sequence[float], now: float) -> bool:
        """Whether a rank that has nothing to do would be of use if it had become fast, and it is
        long enough since that was seen.
        """
        if self.by_rank[rank]:
            return False
        hoped = [min(seconds) if other == rank else each for other, each in enumerate(seconds)]
        steps_lost = 1 + (MEASURED + LATE) * max(0.0, seconds[rank] / now - 1)
        return (
            longest(hoped, quickest(hoped, self._slots)) < (1 - GAIN) * now
            and self._idle[rank] * TRIAL >= steps_lost
        )

    def _with_one(self, rank: int, seconds: Sequence[float]) -> tuple[int, ...]:
        others = quickest(
            [math.inf if other == rank else each for other, each in enumerate(seconds)],
            self._slots - 1,
        )
        return tuple(1 if other == rank else count for other, count in enumerate(others))


@dataclass(frozen=True, slots=True)
class _Promise:
    by_rank: tuple[int, ...]
    """The shares of before."""
    before: float
    """The slowest rank's seconds with them."""
    then: float
    """And as promised."""


def _apart(seconds: Sequence[float]) -> str:
    ranks = range(len(seconds))
    slowest, fastest = max(ranks, key=seconds.__getitem__), min(ranks, key=seconds.__getitem__)
    return (
        f"rank {slowest} takes {seconds[slowest] / seconds[fastest]:.1f}x as long for one as rank"
        f" {fastest}"
    )


# -- shares, as pure functions of numbers ---------------------------------------------------------
#
#     seconds that one micro-batch takes, by rank   1  1  1  3
#     16 of them, in shares                         5  5  5  1    a step takes 5: rank 0 is done
#                                                                 after 5 x 1, rank 3 after 1 x 3
#     evenly                                        4  4  4  4    it would take 4 x 3


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
