"""How long a rank was at work, without making it wait: on a GPU by events in its stream, read
when everything is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from lockstep.runtime import status


class Clock:
    """`busy` around pieces of work, `read` for their seconds. Pieces inside a piece do not count
    twice.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._inside = self._notes = False

    @contextmanager
    def busy(self, phase: str) -> Iterator[None]:
        """Count the block, a piece of this phase. Between two pieces a rank waits for others:
        `waiting` around them all.
        """
        if self._inside:
            yield
            return
        self._inside = True
        status.waits(False)
        if self._notes:
            status.enter(phase)
        begin = self._now()
        try:
            yield
        finally:
            self._inside = False
            end = self._now()
            status.waits(True)
            if isinstance(begin, float) and isinstance(end, float):
                self._seconds += end - begin
            else:
                assert not isinstance(begin, float)
                assert not isinstance(end, float)
                self._events.append((begin, end))

    @contextmanager
    def waiting(self, *, notes: bool) -> Iterator[None]:
        """In this block, what is not busy waits for other stages. `notes`: pieces are phases of
        a step.
        """
        self._notes = notes
        status.waits(True)
        try:
            yield
        finally:
            status.waits(False)

    def read(self) -> float:
        """Seconds since the last reading. On a GPU: waits until the work is done."""
        if self._events:
            torch.cuda.synchronize()
        found: float = (
            self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
        )
        self._seconds = 0.0
        self._events.clear()
        return found

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
