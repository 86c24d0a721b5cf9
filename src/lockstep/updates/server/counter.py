"""Decides which rank computes what next: pure decisions, for one asking rank after another.

    draw        some slots of one window, about one draw per rank. Draws are handed out in order to
                the rank that asks, so that a straggler takes fewer
    bound       no window begins more than `bound` windows ahead of the oldest that is not applied;
                0 is synchronous training
    apply       a window whose draws have all been pushed is applied by the next rank that asks. It
                is one window at a time, so that all shards apply windows in one order
    synchronize everything that was handed out has been applied, and every rank knows: at an epoch's
                end, a checkpoint, a request to stop. Nothing is handed out before all ranks have
                come back from it

If a rank dies, its draw is handed out again, and so is the window that it was to apply.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EpochCourse:
    """One epoch, as every rank describes it when it asks."""

    epoch: int
    first: int
    """The number of the epoch's first window, over all epochs."""
    begin: int
    """The place in the epoch of the first window that is not done yet."""
    windows: int
    slots: int
    """Micro-batches per window."""
    last: int
    """Micro-batches of the epoch's last window."""

    def filled(self, place: int) -> int:
        return self.last if place == self.windows - 1 else self.slots


@dataclass(frozen=True, slots=True)
class Draw:
    """Slots [first, last) of the window at `place`. The window is cut into `draws` draws; this one
    is `number`.
    """

    place: int
    number: int
    draws: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Apply:
    """The answer "apply this window": all its draws have been pushed."""

    place: int
    weight: float
    loss: float


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The answer "synchronize": everything before `place` has been applied."""

    place: int
    stop: bool
    over: bool
    """Whether the epoch is over."""
    living: tuple[int, ...]
    weight: float
    """The weight of the window that was applied last."""
    loss: float
    """The sum of losses of that window."""


Answer = Draw | Apply | Synchronize


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a rank reports of a draw that it has computed. Its parameters had seen `version` applied
    windows.
    """

    draw: Draw
    weight: float
    loss: float
    samples: int
    version: int


@dataclass(frozen=True, slots=True)
class WindowDone:
    """The totals, over all its draws, of a window that was applied."""

    place: int
    weight: float
    loss: float
    samples_by_rank: tuple[int, ...]
    age: float
    """The mean number of windows applied between the pull and the application of a draw."""
    reason: str = ""
    """Why the optimizer did not step; "" if it did."""


@dataclass(slots=True)
class _Draws:
    draws: int
    done: dict[int, tuple[int, Pushed]] = field(default_factory=dict)
    """By draw number, the rank that pushed the draw, and its report."""


class Counter:
    """Answers ranks that ask. `next` returns None to a rank that has to wait until the answer to
    another rank changes what there is to do.
    """

    def __init__(self, ranks: int, bound: float) -> None:
        self._ranks, self._bound = ranks, bound
        self.living = set(range(ranks))
        self.version = 0
        """How many windows have been applied."""
        self._course: EpochCourse | None = None
        self._limits: set[int] = set()  # numbers of windows before which all ranks synchronize
        self._stop = False
        self._synchronization: Synchronize | None = None
        self._hear: set[int] = set()  # ranks that have still to be told of the synchronization
        # ranks that have come back from it; the start before the first window counts as one
        self._back: set[int] = set()
        self._open = False
        self._place, self._slot = 0, 0  # of the next draw that was never handed out
        self._began = 0  # the place of the first window after the last synchronization
        self._again: deque[Draw] = deque()
        self._out: dict[int, Draw] = {}
        self._windows: dict[int, _Draws] = {}  # windows begun, and not applied
        self._ready: list[int] = []
        self._applying: tuple[int, int] | None = None  # the rank, and the window's place
        self._last = (0.0, math.nan)

    # -- what is asked ----------------------------------------------------------------------------

    def next(self, rank: int, course: EpochCourse) -> Answer | None:
        """Return what `rank`, which is in epoch `course`, must do next; None: wait."""
        if not self._open:
            if rank in self._hear:
                self._hear.discard(rank)
                return self._synchronization
            self._back.add(rank)
            self._expect(course)
            if self._hear or not self._back >= self.living:
                return None
            self._begin()
        if self._applying is None and self._ready:
            place = self._ready.pop(0)
            self._applying = rank, place
            pushed = [each for _, each in self._windows[place].done.values()]
            return Apply(
                place,
                math.fsum(each.weight for each in pushed),
                math.fsum(each.loss for each in pushed),
            )
        if self._again:
            return self._hand(rank, self._again.popleft())
        draw = self._fresh()
        if draw is not None:
            return self._hand(rank, draw)
        if self._windows or not self._at_limit():
            return None
        return self._synchronize(rank)

    def synchronize_before(self, window: int) -> None:
        """Make all ranks synchronize when the windows below this number have been applied."""
        self._limits.add(window)

    def ask_to_stop(self) -> None:
        """Make all ranks synchronize as soon as all windows that have begun are applied."""
        self._stop = True

    # -- what is said -----------------------------------------------------------------------------

    def pushed(self, rank: int, what: Pushed) -> None:
        """Note that all shards have a draw's gradients."""
        draw = self._out.pop(rank)
        assert draw == what.draw, "a rank pushes what it has drawn"
        window = self._windows[draw.place]
        window.done[draw.number] = rank, what
        if len(window.done) == window.draws:
            self._ready.append(draw.place)
            self._ready.sort()

    def applied(self, rank: int, reason: str = "") -> WindowDone:
        """Note that all shards have applied the window, or, with a `reason`, left it out."""
        assert self._applying is not None
        who, place = self._applying
        assert who == rank, "a rank says that it has applied what it was asked to apply"
        self._applying = None
        done = self._windows.pop(place).done.values()
        samples = [0] * self._ranks
        for by, each in done:
            samples[by] += each.samples
        ages = [self.version - each.version for _, each in done]
        weight = math.fsum(each.weight for _, each in done)
        loss = math.fsum(each.loss for _, each in done)
        self.version += 1
        self._last = weight, loss
        return WindowDone(place, weight, loss, tuple(samples), sum(ages) / len(ages), reason)

    def died(self, rank: int) -> None:
        """Note that a rank has died: give its unfinished work to others."""
        self.living.discard(rank)
        self._hear.discard(rank)
        self._back.discard(rank)
        if (draw := self._out.pop(rank, None)) is not None:
            self._again.append(draw)
        if self._applying is not None and self._applying[0] == rank:
            self._ready.insert(0, self._applying[1])
            self._applying = None

    # -- inside -----------------------------------------------------------------------------------

    def _expect(self, course: EpochCourse) -> None:
        """The first rank to come back sets the epoch; the others must be in the same one."""
        if len(self._back) > 1:
            if course != self._course:
                raise ValueError(f"ranks walk different epochs: {course} and {self._course}")
            return
        if course != self._course or self._synchronization is None or self._synchronization.over:
            self._course, self._place = course, course.begin

    def _begin(self) -> None:
        self._open, self._back, self._synchronization, self._began = True, set(), None, self._place

    def _limit(self) -> int:
        """The place of the first window before which all ranks synchronize."""
        course = self._course
        assert course is not None
        places = [window - course.first for window in self._limits]
        return min([course.windows, *(place for place in places if place > self._began)])

    def _at_limit(self) -> bool:
        return not self._slot and (self._place >= self._limit() or self._stop)

    def _fresh(self) -> Draw | None:
        course = self._course
        assert course is not None
        if self._at_limit():
            return None
        if not self._slot and self._windows and self._place - min(self._windows) > self._bound:
            return None
        filled = course.filled(self._place)
        size = max(1, -(-filled // self._ranks))
        draws = -(-filled // size)
        first = self._slot
        draw = Draw(self._place, first // size, draws, first, min(first + size, filled))
        self._windows.setdefault(draw.place, _Draws(draws))
        self._slot = draw.last
        if self._slot == filled:
            self._place, self._slot = self._place + 1, 0
        return draw

    def _hand(self, rank: int, draw: Draw) -> Draw:
        assert rank not in self._out, "a rank draws when it has pushed"
        self._out[rank] = draw
        return draw

    def _synchronize(self, rank: int) -> Synchronize:
        assert self._course is not None
        over = self._place >= self._course.windows
        self._synchronization = Synchronize(
            self._place, self._stop, over, tuple(sorted(self.living)), *self._last
        )
        self._open, self._stop = False, False
        self._limits = {
            window for window in self._limits if window > self._course.first + self._place
        }
        self._hear, self._back = self.living - {rank}, set()
        return self._synchronization
