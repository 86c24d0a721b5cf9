"""Shares that follow measured speed. The input is the seconds that a micro-batch took on each rank;
the output is the number of micro-batches that each rank computes in the next window.

    window   k - 1   k        k + 1
    work     ######  ######             the seconds of a micro-batch in k - 1, by rank, are sent
                                        with the facts of step k (from a GPU perhaps later)
    noted            ^ k - 1            so all ranks have the same numbers at the end of k
    decided                   ^         and decide the same for k + 1, without an extra message

This module reads no clock and does not know its own rank. Its decisions depend only on the noted
seconds, so they are the same on every rank.
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
"""First steps that are not measured: memory is allocated, kernels are chosen, caches are cold."""
LATE = 2
"""Steps after a move whose noted seconds still belong to a step before the move."""
MEASURED, REMEMBERED = 5, 20
"""MEASURED: steps needed since the last move before a decision. REMEMBERED: the largest number of
steps of which the median is taken. The median ignores a single delayed step.
"""
GAIN, DOUBT = 0.05, 0.5
"""A move must promise to shorten a step by the fraction GAIN + DOUBT / steps. GAIN: a move loses
the batches that loader workers have fetched ahead, at most one step, which 5 % earns back in 20
steps. DOUBT: what few steps show may be chance.
"""
TRIAL = 0.01
"""Largest fraction of the time that trials of idle ranks may cost."""
MOST_PATIENCE = 320
"""Largest number of steps between two moves, if moves do not bring what they promise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewShares:
    """New shares, and why."""

    by_rank: tuple[int, ...]
    """Micro-batches of a full step, by rank."""
    seconds: tuple[float, ...]
    """Estimated seconds that one micro-batch takes, by rank."""
    why: str

    def __str__(self) -> str:
        return f"micro-batches by rank: {in_words(self.by_rank)} ({self.why})"


class Balancer:
    """Decides the shares of one Loader. `begin` opens each window in order, and `note` ends its
    step; all ranks make the same calls.
    """

    def __init__(self, slots: int, size: int) -> None:
        each, more = divmod(slots, size)
        self.by_rank = tuple(each + (rank < more) for rank in range(size))
        """Micro-batches of a full step in the window that was opened last, by rank."""
        self._slots = slots
        self._open = False  # whether a window was handed out since the last step
        self._noted: list[float] | None = None  # seconds by rank in that window's step
        self._steps = 0  # steps whose seconds were taken in
        self._since = 0  # the number of these steps since the last move
        # each rank's seconds for a micro-batch, since the last move
        self._fresh: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(size)]
        self._known: list[float | None] = [None] * size  # each rank's last known median
        self._idle = [0] * size  # steps since the rank last had a micro-batch
        self._patience = MEASURED
        self._promise: _Promise | None = None  # what the last move promised

    def note(self, seconds: Sequence[float]) -> None:
        """End the step of the open window. `seconds` is the recent time of a micro-batch on each
        rank (0: unknown). If several Steppers call it for one window, their seconds are added.
        """
        if len(seconds) != len(self.by_rank):
            raise UsageError("balance-of-other-ranks", loader=len(self.by_rank), step=len(seconds))
        self._noted = (
            list(seconds)
            if self._noted is None
            else [ours + more for ours, more in zip(self._noted, seconds, strict=True)]
        )

    def leave(self) -> None:
        """Start a walk. Forget an open window whose step was not done: its epoch was left."""
        if self._noted is None:
            self._open = False

    def begin(self) -> NewShares | None:
        """Open the next window, and return the new shares or None if they do not change. Raises
        UsageError if the step of the window before is not done.
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
        # assume that a rank that was never measured is as fast as the fastest
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
        """Return the fresh seconds of each rank that has micro-batches."""
        return [fresh for fresh, count in zip(self._fresh, self.by_rank, strict=True) if count]

    def _at_best(self) -> float:
        """Return the slowest rank's time with the present shares, from each rank's lower quartile.
        Noise may have made the median longer than that.
        """
        best = [sorted(fresh)[len(fresh) // 4] for fresh in self._of_busy()]
        return longest(best, [count for count in self.by_rank if count])

    def _judge(self, now: float) -> tuple[int, ...] | None:
        """Compare the last move with its promise. Return the shares before it if a step did not get
        shorter, else None.

        Speeds may change with the shares, for example if ranks share cores. The shares would then
        change forever, so each broken promise doubles the steps until the next move.
        """
        promise, self._promise = self._promise, None
        if promise is None:
            return None
        kept = now <= (promise.before + promise.then) / 2
        self._patience = MEASURED if kept else min(2 * self._patience, MOST_PATIENCE)
        return promise.by_rank if now >= promise.before else None

    def _worth_a_trial(self, rank: int, seconds: Sequence[float], now: float) -> bool:
        """Whether to give an idle rank one micro-batch, to measure it again. It must have been idle
        long enough, and a step must get shorter if the rank is now as fast as the fastest.
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
    """The shares before the move."""
    before: float
    """The slowest rank's seconds with these shares."""
    then: float
    """The slowest rank's seconds that the move promises."""


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
#     shares of 16 micro-batches                    5  5  5  1    a step takes 5: rank 0 is done
#                                                                 after 5 x 1, rank 3 after 1 x 3
#     equal shares                                  4  4  4  4    a step would take 4 x 3


def quickest(seconds: Sequence[float], slots: int) -> tuple[int, ...]:
    """Return the number of micro-batches of each rank, out of `slots`, so that the slowest rank's
    time is as short as possible. `seconds` is the time of one, by rank (inf: the rank gets none).

    Among equally good shares, the first ranks get more. Ranks of equal speed get equal shares.
    """
    rates = [1 / each for each in seconds]
    assert min(seconds) > 0, "a micro-batch takes some time"
    total = math.fsum(rates)
    assert total > 0, "somebody must compute"
    # in the best shares no rank has less; fewer micro-batches remain than there are ranks
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
    """Return shares in proportion to `weights`, as if they were speeds. Weight 0 gets none."""
    return quickest([math.inf if each == 0 else 1 / each for each in weights], slots)


def longest(seconds: Sequence[float], counts: Sequence[int]) -> float:
    """Return the time of a step with these shares: the slowest rank's time."""
    return max(each * count for each, count in zip(seconds, counts, strict=True) if count)


def in_words(counts: Sequence[int]) -> str:
    """Return "5, 5, 5, 1"; for more than 8 ranks, "5 (ranks 0-61), 1 (rank 62)"."""
    if len(counts) <= 8:
        return ", ".join(map(str, counts))
    found: list[tuple[int, int, int]] = []  # (count, first rank, last rank)
    for rank, count in enumerate(counts):
        first = found.pop()[1] if found and found[-1][0] == count else rank
        found.append((count, first, rank))
    return ", ".join(
        f"{count} ({f'ranks {first}-{last}' if last > first else f'rank {first}'})"
        for count, first, last in found
    )
