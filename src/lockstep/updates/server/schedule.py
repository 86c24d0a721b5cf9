"""Decides which rank computes what next: pure decisions, for one asking rank after another.

draw         some slots of one window, about one draw per rank. Draws are handed out in order to
             the rank that asks, so that a straggler takes fewer
bound        no window begins more than `bound` windows ahead of the oldest that is incomplete;
             0 is synchronous training
synchronize  every draw has been pushed, and every rank is told: at an epoch's end, before a
             given step, after a request to stop. Nothing is handed out before all ranks ask
             again
"""

from __future__ import annotations

from lockstep.data.window_loader import DynamicSlots, EpochCourse


class Schedule:
    """Answers the ranks that ask. `next` returns None to a rank that must wait until another rank
    asks or pushes.
    """

    def __init__(self, ranks: int, bound: float) -> None:
        self._ranks = ranks
        self._bound = bound
        self._course: EpochCourse | None = None
        self._limits: set[int] = set()  # numbers of steps before which all ranks synchronize
        self._stop = False
        self._synchronization = DynamicSlots(0, 0, 0, over=True)
        self._untold: set[int] = set()
        self._back: dict[int, EpochCourse] = {}  # the ranks that ask again after a synchronization
        self._open = False
        self._index = 0  # of the next draw
        self._slot = 0
        self._missing: dict[int, int] = {}  # slots that are not pushed, of each incomplete window

    def next(self, rank: int, course: EpochCourse) -> DynamicSlots | None:
        """Return what `rank`, which is in epoch `course`, does next; None: wait."""
        if rank in self._untold:
            self._untold.remove(rank)
            return self._synchronization
        if not self._open:
            self._back[rank] = course
            if len(self._back) < self._ranks:
                return None
            self._begin(course)
        if not self._at_limit(course):
            return self._new_draw(course)
        if self._missing:
            return None
        self._open = False
        self._untold = set(range(self._ranks)) - {rank}
        over = self._index == course.steps
        self._synchronization = DynamicSlots(self._index, 0, 0, over, self._stop)
        self._stop = False
        return self._synchronization

    def pushed(self, draw: DynamicSlots) -> bool:
        """Note that a draw's gradients are there. Return whether its window is complete now."""
        self._missing[draw.window] -= draw.last - draw.first
        complete = self._missing[draw.window] == 0
        if complete:
            del self._missing[draw.window]
        return complete

    def synchronize_before(self, step: int) -> None:
        """Make all ranks synchronize when the steps below this number are complete."""
        self._limits.add(step)

    def stop(self) -> None:
        """Make all ranks synchronize as soon as the windows that have begun are complete."""
        self._stop = True

    def _begin(self, course: EpochCourse) -> None:
        if len(set(self._back.values())) > 1:
            raise ValueError(f"ranks walk different epochs: {self._back}")
        if course != self._course or self._synchronization.over:
            self._course = course
            self._index = course.begin
        self._open = True
        self._back = {}
        done = course.first + self._index
        self._limits = {step for step in self._limits if step > done}

    def _at_limit(self, course: EpochCourse) -> bool:
        if self._slot:
            return False
        due = any(step <= course.first + self._index for step in self._limits)
        return due or self._stop or self._index == course.steps

    def _new_draw(self, course: EpochCourse) -> DynamicSlots | None:
        oldest = min(self._missing, default=self._index)
        if not self._slot and self._index - oldest > self._bound:
            return None
        filled = course.last if self._index == course.steps - 1 else course.slots
        size = -(-filled // self._ranks)
        stop = min(self._slot + size, filled)
        draw = DynamicSlots(self._index, self._slot, stop)
        self._missing.setdefault(self._index, filled)
        self._slot = stop
        if stop == filled:
            self._index += 1
            self._slot = 0
        return draw
