"""Waiting for another process's number in shared memory to grow: never for ever, and never at the cost of the process awaited.

First a short spin, which is all that is needed while every rank has a core; then the core is given away; then naps. A rank on a core that
somebody else needs would spin against the very one it waits for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

_YIELDS = 0.002  # seconds
_LONGEST_NAP = 0.001
_LOOK = 0.1  # seconds between two looks at whether the others live


class Waits:
    """Waits on the words of `view`. `look()` raises where a rank that is awaited has ended; `late(ranks)` makes the error at the deadline."""

    def __init__(self, view: memoryview, ranks: int, look: Callable[[], None], late: Callable[[Sequence[int]], Exception]) -> None:
        self._view = view
        self._look = look
        self._late = late
        cores = len(os.sched_getaffinity(0))
        self._spins = 300 if ranks <= cores else 0

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
        while not all(view[place] >= least for place in places):
            now = time.monotonic()
            if now - begin < _YIELDS:
                os.sched_yield()
                continue
            nap = min(_LONGEST_NAP, nap + 0.00002)
            time.sleep(nap)
            if now - looked > _LOOK:
                looked = now
                self._look()
                if now - begin > timeout:
                    raise self._late([rank for rank, place in enumerate(places) if view[place] < least])
