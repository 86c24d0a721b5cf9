"""The counter for many askers at once: whoever has to wait does so here, and the death of a rank is heard of here."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition

from lockstep.updates.server.counter import Answer, Applied, Counter, Course, Pushed

_LOOK_SECONDS = 0.2  # between two looks for the dead


class Desk:
    """On rank 0, asked by its own worker and by the threads that answer for the others'.

    `needed`: ranks without which the parameters are not whole. `dead(rank)` looks whether a rank is.
    """

    def __init__(self, counter: Counter, needed: int, dead: Callable[[int], bool]) -> None:
        self._counter, self._needed, self._dead = counter, needed, dead
        self._changed = Condition()
        self._looked = time.monotonic()
        self.gone: int | None = None
        """A rank that cannot be done without, and has died or failed: nobody goes on."""
        self._applied: list[tuple[Applied, float]] = []

    def ask(self, rank: int, course: Course, said: Pushed | str | None, *, stop: bool) -> Answer | None:
        """What `rank` shall do next, when there is something. `said`: what it has pushed; or, of a window that it has applied, why it did not.

        None where a rank has gone that cannot be done without.
        """
        with self._changed:
            if rank not in self._counter.living:
                return None
            if isinstance(said, Pushed):
                self._counter.pushed(rank, said)
            elif said is not None:
                self._applied.append((self._counter.applied(rank, said), time.perf_counter()))
            if stop:
                self._counter.ask_to_stop()
            self._changed.notify_all()
            while self.gone is None and rank in self._counter.living:
                answer = self._counter.next(rank, course)
                if answer is not None:
                    self._changed.notify_all()
                    return answer
                self._changed.wait(_LOOK_SECONDS)
                self._look()
            return None

    def _look(self) -> None:
        """For those who have died while nobody listened to them: waiting here themselves."""
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            for rank in sorted(self._counter.living):
                if self._dead(rank):
                    self._lost(rank)

    def lost(self, rank: int) -> None:
        """It has died, or left without a word."""
        with self._changed:
            self._lost(rank)
            self._changed.notify_all()

    def _lost(self, rank: int) -> None:
        if rank < self._needed:
            self.gone = rank if self.gone is None else self.gone
        else:
            self._counter.died(rank)

    def meet_before(self, window: int) -> None:
        with self._changed:
            self._counter.meet_before(window)

    def applied(self) -> list[tuple[Applied, float]]:
        """The windows that were applied since this was asked last, and when they were (perf_counter)."""
        with self._changed:
            found, self._applied = self._applied, []
            return found
