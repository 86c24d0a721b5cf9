"""Whom the others wait for, and in which phase it is behind them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.tools.report.judged import Judged, RankTimes, milliseconds

Cause = Literal[
    "data", "forward", "backward", "computation", "work", "optimizer", "checks", "other", "network"
]
_CAUSES: Mapping[Cause, tuple[tuple[str, ...], str]] = {
    "data": (("data",), "its loader"),
    "forward": (("forward",), "its forward"),
    "backward": (("backward",), "its backward"),
    "optimizer": (("optimizer",), "its optimizer"),
    "checks": (("checks",), "its checks"),
    "other": (("other",), "its own code between steps"),
    "network": (("moving",), "its network"),
    "computation": (("forward", "backward"), "its forward and backward"),
}
"""The phases of which each consists, and its words."""
SHARED = "shared memory"
"""How a reduction's name begins that sends nothing."""
LEAST = 0.02
"""Of all time: what is lost to less is not worth a word."""
_STEADY = 0.5
"""Of what the others wait for a rank, it must be so much behind them on average; else it is only
its turn to be the last.
"""
_SURE = 3
"""Standard errors by which it must be behind them: in a few steps somebody always happens to be
slowest.
"""
_ALIKE = 0.1
"""Ranks are equally fast that differ by less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A place that is behind the others in most steps."""

    place: int
    share: float
    """Of all ranks' time, that the others waited for it."""
    cause: Cause
    mine: float
    """Seconds a step in that phase; for "work", micro-batches a step."""
    others: float
    """The median of the other places'."""

    def named(self, found: Judged) -> str:
        """`rank 3 (its loader: 212 ms against 11)`."""
        if self.cause == "work":
            why = f"{self.mine:.3g} micro-batches a step against {self.others:.3g}"
        else:
            shared = self.cause == "network" and found.begin.reduction.startswith(SHARED)
            what = "its part of the sums" if shared else _CAUSES[self.cause][1]
            why = f"{what}: {milliseconds(self.mine)} ms against {milliseconds(self.others)}"
        return f"{found.name(self.place)} ({why})"


def next_straggler(judged: Judged, named: Sequence[Straggler]) -> Straggler | None:
    """Who would be waited for if those `named` were as quick as the others: nobody waits for it
    now, since they come later still.
    """
    rest = {
        number: place
        for number, place in judged.places.items()
        if number not in {each.place for each in named}
    }
    if not named or len(rest) < 2:
        return None
    number, place = max(rest.items(), key=lambda each: each[1].busy)
    others = [each for other, each in rest.items() if other != number]
    theirs = statistics.median_low([each.busy for each in others])
    if place.busy - theirs < max(_ALIKE * theirs, _SURE * place.error):
        return None
    found = _explained(number, 0.0, place, others)
    return None if found.cause == "work" else found


def stragglers(judged: Judged) -> list[Straggler]:
    """Most waited for first. Empty where nobody is, or each in turn."""
    if judged.alone or len(judged.places) < 2:
        return []
    found = []
    for number, seconds in judged.lost_to.items():
        share = seconds / judged.seconds
        if share < LEAST or number not in judged.places:
            continue
        place = judged.places[number]
        others = [each for other, each in judged.places.items() if other != number]
        behind = place.busy - statistics.median_low([each.busy for each in others])
        if behind >= max(
            _STEADY * seconds / sum(each.steps for each in others), _SURE * place.error
        ):
            found.append(_explained(number, share, place, others))
    return found


def _explained(number: int, share: float, place: RankTimes, others: list[RankTimes]) -> Straggler:
    """Others' times are medians, the lower one of an even number: with three ranks of which two
    are slow, the third is the measure.
    """

    def compared(cause: Cause) -> tuple[float, float]:
        phases, _ = _CAUSES[cause]
        return place.each(*phases), statistics.median_low([each.each(*phases) for each in others])

    excess = {cause: mine - theirs for cause in _CAUSES for mine, theirs in [compared(cause)]}
    cause: Cause = max(
        (cause for cause in _CAUSES if cause != "computation"), key=lambda each: excess[each]
    )
    if cause in ("forward", "backward"):
        pieces = statistics.median_low([each.pieces for each in others])
        speed = statistics.median_low(
            [each.computing / each.pieces for each in others if each.pieces] or [0.0]
        )
        if place.pieces > pieces and place.computing / place.pieces <= (1 + _ALIKE) * speed:
            return Straggler(
                place=number, share=share, cause="work", mine=place.pieces, others=pieces
            )
        if min(excess["forward"], excess["backward"]) > 0.25 * (
            excess["forward"] + excess["backward"]
        ):
            cause = "computation"
    mine, theirs = compared(cause)
    return Straggler(place=number, share=share, cause=cause, mine=mine, others=theirs)
