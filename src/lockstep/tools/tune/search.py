"""One knob at a time: the settings that run a task fastest, found by timing them in turns with the
best ones so far.

The search knows neither processes nor models, only a Bench that times two points. Knobs are not
tried in all combinations, which would multiply; what the order of the knobs may have missed is the
price. At the end the winner takes turns with the default once more, with figures that nobody has
chosen it by, and has to be faster there too: the best of many noisy figures looks better than it
is.

Turns are compared pairwise, because what else the machine did fell on both of a pair. The noise of
the median of their ratios is that of a box plot's notch, 1.57 times the interquartile range over
the root of their number (McGill, Tukey and Larsen, 1978).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median, quantiles
from typing import Any, Protocol

Value = str | int | float | None
Point = Mapping[str, Value]
_FINAL = 3  # comparisons' worth of time for the last one, which decides

NO_TIME = "no time left"
_LEAST_GAIN = 0.01  # what is not worth a settings file; also where few turns lie together by chance
_NOTCH = 1.57


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTimes:
    """Seconds of a step: medians and 25th percentiles of both; `ratio` is the candidate's over
    the base's, `noise` what it may be off.
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
        """From the seconds of every turn, at least two of each, equally many."""
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
    """A setting: its default, what else it may be, and, where there is nothing else, why."""

    name: str
    default: Value
    others: tuple[Value, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobRow:
    """One value of a knob, beside the best settings before it; without a comparison `note` says
    why it was not tried.
    """

    knob: str
    value: Value = None
    comparison: PairedTimes | None = None
    won: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """`winner` holds every knob's value; it is the default's own where nothing else was faster
    in `final`.
    """

    default: dict[str, Value]
    winner: dict[str, Value]
    rows: tuple[KnobRow, ...]
    final: PairedTimes | None
    """The default against what had won knob by knob; None where nothing had."""

    @property
    def changes(self) -> dict[str, Any]:
        """What the winner has otherwise than the default."""
        return {name: value for name, value in self.winner.items() if value != self.default[name]}


class Refused(Exception):
    """A point cannot run here; the text says why."""


class Bench(Protocol):
    """Times points. Where several ranks search, all its answers are the same on all of them."""

    def time(
        self, base: Point, candidate: Point, seconds: float
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of each turn of both, in about so many seconds. Raises Refused for a candidate
        that cannot run.
        """
        ...

    def left(self) -> float:
        """Seconds that are left."""
        ...

    def least(self, base: Point, candidate: Point) -> float:
        """Seconds that the shortest comparison of the two takes."""
        ...


def search(
    knobs: Sequence[Tunable], bench: Bench, say: Callable[[KnobRow], None] = lambda row: None
) -> Found:
    """The fastest point that was found. `say` hears of every row as it is known.

    Time is shared evenly over what is still to be tried. Where it runs out the rest is not tried,
    and said; the last comparison is always made.
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
    if bench.left() < 2 * bench.least(best, candidate):  # this one, and the last if it wins
        return KnobRow(knob=name, value=value, note=NO_TIME)
    try:
        found = PairedTimes.of(*bench.time(best, candidate, seconds))
    except Refused as refusal:
        return KnobRow(knob=name, value=value, note=str(refusal))
    return KnobRow(knob=name, value=value, comparison=found, won=found.faster)
