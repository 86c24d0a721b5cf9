"""Search for the settings that run a task fastest, one knob at a time. Each candidate alternates
with the best settings so far.

The search knows no processes and no models, only a Bench that times two points. It does not try all
combinations of knobs, because their number multiplies; so it may miss the best one. At the end the
winner alternates with the default again and must be faster in these new figures too: the best of
many noisy figures looks better than it is.

Turns are compared pairwise, because other load on the machine affects both turns of a pair. The
noise of the median of their ratios is that of a box plot's notch: 1.57 times the interquartile
range, divided by the root of their number (McGill, Tukey and Larsen, 1978).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median, quantiles
from typing import Any, Protocol

Value = str | int | float | None
Point = Mapping[str, Value]
_FINAL = 3  # the last comparison, which decides, gets the time of this many

NO_TIME = "no time left"
_LEAST_GAIN = 0.01  # less is not worth a settings file, and few turns may agree by chance
_NOTCH = 1.57


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTimes:
    """Seconds of a step for the base and the candidate: medians and 25th percentiles. `ratio` is
    the median ratio of candidate to base, and `noise` is its uncertainty.
    """

    turns: int
    base: float
    base_p25: float
    candidate: float
    candidate_p25: float
    ratio: float
    noise: float

    @classmethod
    def of(cls, base: Sequence[float], candidate: Sequence[float]) -> PairedTimes:
        """Compare the seconds of every turn. There must be at least two turns, as many of each."""
        ratios = [theirs / ours for ours, theirs in zip(base, candidate, strict=True)]
        first, _, third = quantiles(ratios, n=4, method="inclusive")
        return cls(
            turns=len(ratios),
            base=median(base),
            base_p25=quantiles(base, n=4, method="inclusive")[0],
            candidate=median(candidate),
            candidate_p25=quantiles(candidate, n=4, method="inclusive")[0],
            ratio=median(ratios),
            noise=_NOTCH * (third - first) / sqrt(len(ratios)),
        )

    @property
    def faster(self) -> bool:
        """Whether the candidate is faster by more than noise."""
        return self.ratio + max(self.noise, _LEAST_GAIN) < 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Tunable:
    """A setting with its default and the other values to try; `reason` says why there are none."""

    name: str
    default: Value
    others: tuple[Value, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobRow:
    """One value of a knob, compared with the best settings before it. If there is no comparison,
    `note` says why it was not tried.
    """

    knob: str
    value: Value = None
    comparison: PairedTimes | None = None
    won: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The result of a search. `winner` has a value for every knob; it equals the default if nothing
    was faster in `final`.
    """

    default: dict[str, Value]
    winner: dict[str, Value]
    rows: tuple[KnobRow, ...]
    final: PairedTimes | None
    """The default compared with the combination of all winning values; None if no value won."""

    @property
    def changes(self) -> dict[str, Any]:
        """The values in which the winner differs from the default."""
        return {name: value for name, value in self.winner.items() if value != self.default[name]}


class Refused(Exception):
    """A point cannot run here; the text says why."""


class Bench(Protocol):
    """Times points. If several ranks search, its answers are the same on all ranks."""

    def time(
        self, base: Point, candidate: Point, seconds: float
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Return the seconds of each turn of both points, measured in about `seconds` altogether.
        Raises Refused for a candidate that cannot run.
        """
        ...

    def left(self) -> float:
        """Return the remaining seconds of the search."""
        ...

    def least(self, base: Point, candidate: Point) -> float:
        """Return the seconds that the shortest comparison of the two takes."""
        ...


def search(
    knobs: Sequence[Tunable], bench: Bench, say: Callable[[KnobRow], None] = lambda row: None
) -> Found:
    """Return the fastest point that was found. `say` is called with every row at once.

    Time is divided evenly among the values that are still to be tried. If it runs out, the rows of
    the remaining values say so; the last comparison is always made.
    """
    default = {knob.name: knob.default for knob in knobs}
    best, rows = dict(default), []
    waiting = sum(len(knob.others) for knob in knobs)
    for knob in knobs:
        tried = [KnobRow(knob=knob.name, note=knob.reason)] if not knob.others else []
        for row in tried:
            say(row)
        for value in knob.others:
            seconds = bench.left() / (waiting + _FINAL)
            waiting -= 1
            row = _try(knob.name, value, best, bench, seconds)
            if row.won:
                best[knob.name] = value
            tried.append(row)
            say(row)
        rows += tried
    final = None
    if best != default:
        final = PairedTimes.of(*bench.time(default, best, max(0.0, bench.left())))
        best = best if final.faster else default
    return Found(default=default, winner=dict(best), rows=tuple(rows), final=final)


def _try(name: str, value: Value, best: Point, bench: Bench, seconds: float) -> KnobRow:
    candidate = {**best, name: value}
    if bench.left() < 2 * bench.least(best, candidate):  # this one, and the last if this wins
        return KnobRow(knob=name, value=value, note=NO_TIME)
    try:
        found = PairedTimes.of(*bench.time(best, candidate, seconds))
    except Refused as refusal:
        return KnobRow(knob=name, value=value, note=str(refusal))
    return KnobRow(knob=name, value=value, comparison=found, won=found.faster)
