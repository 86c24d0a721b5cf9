"""Slots that are drawn: where the ranks take a step's micro-batches from a counter one after the
other, in place of fixed shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lockstep.data.windows import Plan


@dataclass(frozen=True, slots=True)
class Drawn:
    """What this rank does next: `slots` of the step at `place` in its epoch. Or, without slots, it
    meets the others.

    Then all steps before `place` are done, and `over` says whether the epoch is.
    """

    place: int
    slots: range
    over: bool = False


class Draws(Protocol):
    """Who deals out the slots. Every rank walks the same epochs, each with as many windows as it
    gets.
    """

    def draw(self, epoch: int, first: int, begin: int, plan: Plan) -> Drawn:
        """The next of an epoch that begins with the step number `first` over all epochs, and of
        which this run does those from `begin` on.
        """
        ...
