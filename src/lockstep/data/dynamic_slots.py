"""Slots that are assigned to the ranks while they train, in place of fixed shares: what a parameter
server says to a Loader, and the windows that follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from lockstep.data.windows import Window

if TYPE_CHECKING:
    from lockstep.data.loader import Epoch, Loader


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


def drawn_windows(
    loader: Loader, epoch: Epoch, draw: Callable[[EpochCourse], DynamicSlots]
) -> Iterator[Window]:
    """Yield a window for each range of slots assigned to this rank, and an empty window where all
    ranks synchronize. The last one is at the epoch's end.
    """
    plan = loader.batch_plan.plan(epoch.number)
    first = loader.batch_plan.first(epoch.number)
    last = len(plan.at(len(epoch) - 1, epoch.number, 0).filled(0, 1))
    course = EpochCourse(epoch.number, first, epoch.begin, len(epoch), plan.slots, last)
    over = False
    while not over:
        number, begin, end, over, _ = draw(course)
        slots = range(begin, end)
        index = number if slots else max(0, number - 1)
        cut = plan.at(index, epoch.number, first + index)
        if slots:
            walk = loader.walk(epoch.number, range(index, index + 1), slots)
            window = loader.window(cut, walk.take, slots)
            if walk.ahead:
                walk.fetch_ahead(len(window))
        else:
            window = loader.window(cut, tuple, slots)
            if over:
                loader.move_to(epoch.number + 1, 0)
            else:
                loader.move_to(epoch.number, number)
        yield window
        window.drain()
