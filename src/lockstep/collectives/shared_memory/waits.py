"""Waiting for another process's number in shared memory to grow: never for ever, and never at the
cost of the process awaited.

While every rank has a core: a short spin, which is all that is mostly needed; then the core is
given away; then naps. Where ranks share cores a rank that looks again and again takes time from the
very one that it waits for, so it sleeps until it is woken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from lockstep.collectives.shared_memory import futex
from lockstep.errors import PeerFailed
from lockstep.runtime import status

_SPINS = 300
_YIELDS = 0.002  # seconds
_LONGEST_NAP = 0.001
_LOOK = 0.1  # seconds between two looks at whether the others live
_WORD = 8  # bytes


class Waits:
    """Waits on the words of `view`, which lie at `address`.

    `crowded`, the same on all ranks: they have fewer cores than they are. `look(ranks)` raises
    where one of them has ended; `late(ranks)` makes the error at the deadline.
    """

    def __init__(
        self,
        view: memoryview,
        address: int,
        *,
        crowded: bool,
        look: Callable[[Sequence[int]], None],
        late: Callable[[Sequence[int]], Exception],
    ) -> None:
        self._view, self._address = view, address
        self._crowded = crowded
        self._look = look
        self._late = late
        self._spins, self._yields = _SPINS, _YIELDS

    def nap(self) -> None:
        """From now on neither spin nor yield: for waits on a thread beside one that computes,
        which they would keep from the interpreter.
        """
        self._spins, self._yields = 0, 0.0

    def post(self, place: int, number: int) -> None:
        """Let the others see this number."""
        self._view[place] = number
        if self._crowded:
            futex.wake(self._address + _WORD * place)

    def until(self, places: Sequence[int], least: int, timeout: float) -> None:
        """Return when every word in `places` (by rank) is `least` or more."""
        view = self._view
        for _ in range(1 if self._crowded else self._spins):
            for place in places:
                if view[place] < least:
                    break
            else:
                return
        status.waits(True)
        begin = looked = time.monotonic()
        nap = 0.0
        while (
            behind := next((place for place in places if view[place] < least), None)
        ) is not None:
            now = time.monotonic()
            if self._crowded:
                if (seen := view[behind]) < least:
                    futex.sleep(self._address + _WORD * behind, seen, _LOOK)
            elif now - begin < self._yields:
                os.sched_yield()
                continue
            else:
                nap = min(_LONGEST_NAP, nap + 0.00002)
                time.sleep(nap)
            if now - looked > _LOOK:
                looked = now
                self._look_for(self._missing(places, least), places, least)
                if now - begin > timeout:
                    raise self._late(self._missing(places, least))
        status.waits(False)

    def _look_for(self, missing: list[int], places: Sequence[int], least: int) -> None:
        try:
            self._look(missing)
        except PeerFailed:
            if self._missing(places, least) == missing:  # else it wrote its word, and then ended
                raise

    def _missing(self, places: Sequence[int], least: int) -> list[int]:
        return [rank for rank, place in enumerate(places) if self._view[place] < least]


def crowded(cores_of: Sequence[Sequence[int]]) -> bool:
    """Whether ranks that may run on these cores, by rank, are more than the cores."""
    return len(cores_of) > len(set().union(*cores_of))
