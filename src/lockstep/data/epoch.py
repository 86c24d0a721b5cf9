"""One epoch of a Loader: its windows in order. A window has this rank's fixed share of a step's
micro-batches, or the slots that a parameter server has assigned to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.data.window_loader import Position
from lockstep.data.windows import Cut, Plan, Window

if TYPE_CHECKING:
    from lockstep.data.loader import Loader


class EpochCourse(NamedTuple):
    """One epoch, as a rank describes it to whoever assigns slots dynamically. Every rank walks the
    same epochs, but the number of windows may differ between ranks.
    """

    epoch: int
    first: int
    """The number of the epoch's first step, over all epochs."""
    begin: int
    """The index in the epoch of the first step that this run does."""
    steps: int
    slots: int
    """Micro-batches of a step."""
    last: int
    """Micro-batches of the epoch's last step."""


class DynamicSlots(NamedTuple):
    """The next work of this rank: slots [first, last) of a window, by its index in the epoch. If
    there are none, all ranks synchronize instead: all windows before this one are done.
    """

    window: int
    first: int
    last: int
    over: bool = False
    """Whether the epoch is over."""
    stop: bool = False
    """Whether a rank asked to stop."""


class Epoch:
    """One epoch. Iteration yields its windows in order; `len` is its number of steps, the same on
    all ranks.

    A resumed epoch yields the windows from its step `begin` on; its length stays.
    """

    def __init__(self, loader: Loader, number: int, begin: int = 0) -> None:
        self.number = number
        self.begin = begin
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.batch_plan.plan(self.number).steps_per_epoch

    def __repr__(self) -> str:
        return f"Epoch({self.number}, {len(self)} steps)"

    def __iter__(self) -> Iterator[Window]:
        """Yield every step's Window, empty ones too. Batches that the loop did not take from a
        window are fetched before the next window.
        """
        loader = self._loader
        steps = len(self)
        loader._position = Position(self.number, self.begin)
        yield from (self._shared(steps) if loader.draw is None else self._drawn(loader.draw))

    def _shared(self, steps: int) -> Iterator[Window]:
        """Yield windows of this rank's share."""
        loader = self._loader
        rank, size, (plan, first) = loader.rank, loader.size, self._plan
        walk = loader._walk_of(self.number, range(self.begin, steps), loader.share)
        for place in range(self.begin, steps):
            cut = plan.at(place, self.number, first + place, loader.by_rank)
            window = self._window(cut, walk.take)
            if walk.ahead:
                count = len(window)
                if place + 1 < steps:
                    following = plan.at(place + 1, 0, 0, cut.by_rank)
                    count += len(following.filled(rank, size))
                walk.fetch_ahead(count)
            loader._hand_out(self.number, place, steps)
            yield window
            window.drain()

    def _drawn(self, draw: Callable[[EpochCourse], DynamicSlots]) -> Iterator[Window]:
        """Yield a window for each range of slots assigned to this rank, and an empty window where
        all ranks synchronize. The last one is at the epoch's end.
        """
        loader = self._loader
        plan, first = self._plan
        last = len(plan.at(len(self) - 1, self.number, 0).filled(0, 1))
        course = EpochCourse(self.number, first, self.begin, len(self), plan.slots, last)
        over = False
        while not over:
            number, begin, end, over, _ = draw(course)
            slots = range(begin, end)
            index = number if slots else max(0, number - 1)
            cut = plan.at(index, self.number, first + index)
            if slots:
                walk = loader._walk_of(self.number, range(index, index + 1), slots)
                window = self._window(cut, walk.take, slots)
                if walk.ahead:
                    walk.fetch_ahead(len(window))
            else:
                window = self._window(cut, tuple, slots)
                begins = (self.number + 1, 0) if over else (self.number, number)
                loader._position, loader._loaded = Position(*begins), False
            yield window
            window.drain()

    @property
    def _plan(self) -> tuple[Plan, int]:
        """The epoch's plan, and the number of its first step, counted over all epochs."""
        batch_plan = self._loader.batch_plan
        return batch_plan.plan(self.number), batch_plan.first(self.number)

    def _window(self, cut: Cut, take: Callable[[], Any], drawn: range | None = None) -> Window:
        loader = self._loader
        counts = partial(loader.batch_plan.counts, cut)
        window = Window(cut, loader.rank, loader.size, take, counts, loader.recipe, drawn)
        window.read = loader._read
        return window
