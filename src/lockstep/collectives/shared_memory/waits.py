"""Waiting for another process's number in shared memory to grow: never for ever, and never at the cost of the process awaited.

First a short spin, which is all that is needed while every rank has a core; then the core is given away; then naps. A rank on a core that
somebody else needs would spin against the very one it waits for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from lockstep import status
from lockstep.errors import PeerFailed

_YIELDS = 0.002  # seconds
_LONGEST_NAP = 0.001
_LOOK = 0.1  # seconds between two looks at whether the others live


class Waits:
    """Waits on the words of `view`. `look(ranks)` raises where one of them has ended; `late(ranks)` makes the error at the deadline."""

    def __init__(
        self, view: memoryview, ranks: int, look: Callable[[Sequence[int]], None], late: Callable[[Sequence[int]], Exception]
    ) -> None:
        self._view = view
        self._look = look
        self._late = late
        cores = len(os.sched_getaffinity(0))
        self._spins = 300 if ranks <= cores else 0
        self._yields = _YIELDS

    def nap(self) -> None:
        """From now on neither spin nor yield: for waits on a thread beside one that computes, which they would keep from the interpreter."""
        self._spins, self._yields = 0, 0.0

    def until(self, places: Sequence[int], least: int, timeout: float) -> None:
        """Return when every word in `places` (by rank) is `least` or more."""
        view = self._view
        for _ in range(self._spins):
            for place in places:
                if view[place] < least:
                    break
            else:
                return
        begin = looked = time.monotonic()
        nap = 0.0
        status.waits(True)
        while not all(view[place] >= least for place in places):
            now = time.monotonic()
            if now - begin < self._yields:
                os.sched_yield()
                continue
            nap = min(_LONGEST_NAP, nap + 0.00002)
            time.sleep(nap)
            if now - looked > _LOOK:
                looked = now
                missing = self._missing(places, least)
                try:
                    self._look(missing)
                except PeerFailed:
                    if self._missing(places, least) == missing:  # else it wrote its word, and then ended
                        raise
                if now - begin > timeout:
                    raise self._late(self._missing(places, least))
        status.waits(False)

    def _missing(self, places: Sequence[int], least: int) -> list[int]:
        return [rank for rank, place in enumerate(places) if self._view[place] < least]
