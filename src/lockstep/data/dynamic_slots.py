"""Slots that are assigned to the ranks while they train, in place of fixed shares: what a parameter
server says to a Loader.
"""

from __future__ import annotations

from typing import NamedTuple


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
