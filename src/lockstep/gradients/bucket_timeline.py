"""When each bucket left this rank and when its sum arrived: how much of the communication the
backward hid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.collectives.work import Work, asks

_SECOND = 1e9  # ns


class BucketTimes(NamedTuple):
    """The times of one bucket, in seconds of this process's monotonic clock."""

    left: float
    arrived: float | None
    """None if not known yet."""


class BucketTimeline:
    """The times of one window's buckets. Looking never waits: a sum counts as arrived when somebody
    looks, or waits for it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._asks: list[Callable[[], bool] | None] = []
        self._left: list[int] = []
        self._arrived: list[int | None] = []
        self._looked = 0  # the sums before this number have arrived
        self._over: int | None = None

    def launched(self, work: Work) -> None:
        self._asks.append(asks(work))
        self._left.append(time.monotonic_ns())
        self._arrived.append(None)

    def look(self) -> None:
        """Note which sums have arrived. They arrive in the order in which they left."""
        while (
            self._looked < len(self._asks)
            and (done := self._asks[self._looked]) is not None
            and done()
        ):
            self._arrived[self._looked] = time.monotonic_ns()
            self._looked += 1

    def backward_is_over(self) -> None:
        """Note that the backward has ended: from now on no communication is hidden."""
        self.look()
        self._over = time.monotonic_ns()

    def waited_for(self, number: int) -> None:
        if self._arrived[number] is None:
            self._arrived[number] = time.monotonic_ns()

    def times(self) -> Sequence[BucketTimes]:
        """The times of all buckets, in the order in which they left."""
        return [
            BucketTimes(left / _SECOND, None if at is None else at / _SECOND)
            for left, at in zip(self._left, self._arrived, strict=True)
        ]

    def hidden(self) -> float:
        """Seconds in which at least one bucket was on its way while the backward ran. A sum that
        starts only when a rank waits for it is not hidden.
        """
        total = reached = 0
        for asked, left, arrived in zip(self._asks, self._left, self._arrived, strict=True):
            if asked is not None and self._over is not None and left < self._over:
                end = self._over if arrived is None else min(arrived, self._over)
                total += max(0, end - max(left, reached))
                reached = max(reached, end)
        return total / _SECOND
