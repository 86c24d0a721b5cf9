"""Find the ranks that the others wait for, and the options that would make steps shorter, with the
gain if it can be computed.

The model: a step lasts as long as its slowest rank is busy, plus the time that all ranks wait. An
option changes how long some ranks are busy, and nothing else. Options are not advised if they are
in use, if the method does not support them, or if they would gain less than a few per cent.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.config.settings import Settings
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
"""The phases of each cause, and its name in sentences."""
SHARED = "shared memory"
"""The first words in the name of a reduction that sends nothing."""
LEAST = 0.02
"""The smallest lost fraction of all time that is mentioned."""
_STEADY = 0.5
"""A straggler is behind the others on average by at least this fraction of their wait for it.
Otherwise the ranks are last in turn.
"""
_SURE = 3
"""A straggler is behind the others by at least this many standard errors: in a few steps some rank
is always slowest by chance.
"""
_ALIKE = 0.1
"""Ranks whose times differ by less than this fraction count as equally fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A place that is behind the others in most steps."""

    place: int
    share: float
    """The fraction of all ranks' time that the others waited for it."""
    cause: Cause
    mine: float
    """Its seconds a step in the phases of `cause`; for "work", its micro-batches a step."""
    others: float
    """The median of the other places, in the same unit."""

    def named(self, found: Judged) -> str:
        """`rank 3 (its loader: 212 ms a step, others 11)`."""
        return f"{found.name(self.place)} ({self.why(found)})"

    def why(self, found: Judged) -> str:
        if self.cause == "work":
            if self.mine.is_integer() and self.others.is_integer():
                return f"{self.mine:.0f} micro-batches a step, others {self.others:.0f}"
            return f"on average {self.mine:.2f} micro-batches a step, others {self.others:.2f}"
        shared = self.cause == "network" and found.begin.reduction.startswith(SHARED)
        what = "its part of the all-reduce" if shared else _CAUSES[self.cause][1]
        return f"{what}: {milliseconds(self.mine)} ms a step, others {milliseconds(self.others)}"


def next_straggler(judged: Judged, named: Sequence[Straggler]) -> Straggler | None:
    """Return the place that the others would wait for if those in `named` were as fast as the
    others. Nobody waits for it now, because the named ones arrive later still.
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
    """Return the stragglers, the largest wait first. The list is empty if the others wait for no
    rank, or for a different rank in each step.
    """
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
    """Find the cause of a straggler. It is compared with the median of the others, the lower one of
    an even number: if two of three ranks are slow, the third is the reference.
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


_LEAST = 0.05
"""The smallest gain that is advised."""
_LEAST_OTHER = 0.15
"""The smallest gain that is advised for an option that changes what is trained."""
_MOST_LOADERS = 16
MOST = 3
"""The largest number of advice sentences in one verdict."""
_BUCKETS = 4
"""The number of buckets to advise; the last one cannot be hidden."""
_LEAST_BUCKET = 2**20
"""The smallest bucket to advise, in bytes: the time of a smaller one is all latency."""


@dataclass(frozen=True, slots=True)
class Advice:
    option: str
    """The option as the user types it, or another change in words."""
    gain: float | None
    """The gain as a fraction of samples/s; None if it cannot be computed."""
    remark: str = ""
    """What to know before using the option; always given if the gain is unknown."""
    changes: bool = False
    """Whether it changes what is trained."""

    @property
    def is_worth_it(self) -> bool:
        return self.gain is None or self.gain >= (_LEAST_OTHER if self.changes else _LEAST)

    def __str__(self) -> str:
        """One sentence with the expected gain."""
        if self.gain is None:
            return f"Try {self.option}: {self.remark} ({UNKNOWN})."
        return f"Use {self.option}: {gained(self.gain)}{self.remark and f'; {self.remark}'}."


UNKNOWN = "gain unknown: measure it"


def gained(gain: float, about: str = "about") -> str:
    """Say in words how much faster, for a gain as a fraction of samples/s."""
    return f"{about} " + (
        f"{100 * gain:.0f} % faster" if gain < 1 else f"{1 + gain:.2g} times as fast"
    )


class Case:
    """The judged steps and their model: the seconds that each place is busy in a step (`busy`), and
    the seconds that are added to the longest of them (`common`).
    """

    def __init__(
        self, judged: Judged, behind: Sequence[Straggler], settings: Settings | None
    ) -> None:
        self.judged, self.behind, self.settings, self.begin = judged, behind, settings, judged.begin
        self.places = list(judged.places.values())
        self.busy = np.array([place.busy for place in self.places])
        self.common = max(0.0, self.each("seconds").mean() - self.busy.max())
        self.seconds = self.busy.max() + self.common
        self.ranks_on = Counter(lane.begin.host for lane in judged.generation.lanes.values())
        together = not judged.alone and len(self.places) > 1 and judged.mesh is None
        self.replicated = together and self.begin.method == "replicated"
        """Whether all ranks hold and update the whole model, in the same step."""
        lost = [sum(place.lost.values()) / place.steps for place in self.places]
        self.sums = max(0.0, (self.each("exposed") - lost).min()) if together else 0.0
        """Seconds a step of exposed communication without waits for ranks; 0 if `together` is
        false.
        """
        self.sends = (
            self.replicated and self.sums > 0 and not self.begin.reduction.startswith(SHARED)
        )
        """Whether the ranks send whole gradients in each step and wait for them."""
        plain = settings is not None and settings.compress is None and not settings.exact
        self.may_change = self.sends and plain
        """Whether the advice may include to round gradients or to skip all-reduces."""

    def each(self, *phases: str) -> NDArray[np.float64]:
        """Seconds a step of these phases, by place."""
        return np.array([place.each(*phases) for place in self.places])

    def gain(self, saved: NDArray[np.float64] | float, *, least: float = 0.0) -> float:
        """The gain in samples/s if each place saves these seconds a step, and the step lasts at
        least `least` seconds.
        """
        return float(self.seconds / max((self.busy - saved).max() + self.common, least, 1e-9) - 1)

    def less(self, seconds: float) -> float:
        """The gain in samples/s if a step is shorter by these seconds."""
        return float(self.seconds / max(self.seconds - seconds, 1e-9) - 1)


def advice(judged: Judged, behind: Sequence[Straggler], settings: Settings | None) -> list[Advice]:
    """Return the advice with the largest gain first and unknown gains last. A single step gives no
    advice.
    """
    if judged.first == judged.last:
        return []
    case = Case(judged, behind, settings)
    found = [
        each for each in (rule(case) for rule in _RULES) if each is not None and each.is_worth_it
    ]
    return sorted(found, key=lambda each: -(each.gain or 0.0))[:MOST]


def crowded(judged: Judged) -> dict[str, tuple[int, int, int]]:
    """Return the hosts with fewer cores than threads of ranks: host -> (ranks, threads per rank,
    cores).
    """
    lanes = [lane.begin for lane in judged.generation.lanes.values() if lane.begin.device == "cpu"]
    ranks = Counter(begin.host for begin in lanes)
    few = [
        begin for begin in lanes if begin.cores and ranks[begin.host] * begin.threads > begin.cores
    ]
    return {begin.host: (ranks[begin.host], begin.threads, begin.cores) for begin in few}


def _cores(case: Case) -> Advice | None:
    """Advise fewer workers or threads if ranks share cores. The gain cannot be computed."""
    hosts = crowded(case.judged)
    if len(hosts) != 1 or len(case.ranks_on) != 1:
        return None
    ((ranks, threads, cores),) = hosts.values()
    if ranks > cores:
        return Advice(f"--workers {cores}", None, "each worker then has a core of its own")
    return Advice(
        f"--threads {cores // ranks}", None, f"{ranks} x {threads} threads now share {cores} cores"
    )


def _loader(case: Case) -> Advice | None:
    """Advise as many loader processes as keep up with a step that does not wait for data."""
    waits, now = case.each("data"), case.begin.loader_workers
    left = max(case.seconds / (1 + case.gain(waits)), 1e-9)
    waited = now * case.seconds if now else waits.max()
    workers = min(_MOST_LOADERS, max(math.ceil(waited / left - 1e-9), now + 1))
    gain = case.gain(waits, least=waited / workers)
    option = f"--loader-workers {workers}"
    if workers <= now or gain < _LEAST:
        return None
    if case.begin.device != "cpu" or max(case.ranks_on.values()) < case.begin.cores:
        return Advice(option, gain)
    remark = "it helps only a loader that waits for storage, because all cores are in use"
    return Advice(option, None, remark) if gain >= _LEAST_OTHER else None


def _balance(case: Case) -> Advice | None:
    """Advise micro-batches in proportion to speed, if a rank is slower at equal work."""
    begin, count = case.begin, len(case.places)
    pieces = np.array([place.pieces for place in case.places])
    slow = any(each.cause in ("forward", "backward", "computation") for each in case.behind)
    whole = round(pieces.sum())
    if not slow or case.judged.alone or case.judged.mesh is not None or whole <= count:
        return None
    if case.settings is not None and case.settings.balance is not None:
        return None
    even = begin.micro_batch and -(-begin.global_batch // begin.micro_batch) % count == 0
    if even and len({place.totals["micro_batches"] for place in case.places}) > 1:
        return None  # the shares differ although they divide evenly: already balanced
    computing = case.each("forward", "backward")
    piece = np.divide(computing, pieces, out=np.full(count, np.inf), where=pieces > 0)
    rest = case.busy - computing
    dealt = np.array(deal(whole, piece.tolist(), rest.tolist()))
    longest = (rest + np.multiply(dealt, piece, out=np.zeros(count), where=dealt > 0)).max()
    return Advice("--balance auto", float(case.seconds / (longest + case.common) - 1))


def deal(count: int, seconds: Sequence[float], rest: Sequence[float]) -> list[int]:
    """Divide `count` micro-batches among ranks. A rank takes `seconds` for each of them and `rest`
    besides. Each micro-batch goes to the rank that would finish it first.
    """
    dealt = [0] * len(seconds)
    for _ in range(count):
        done = [
            before + (n + 1) * each for before, n, each in zip(rest, dealt, seconds, strict=True)
        ]
        dealt[done.index(min(done))] += 1
    return dealt


def _sharded(case: Case) -> Advice | None:
    """Advise that each rank updates its share of the parameters, for the same bytes."""
    # The median: a delay of one rank in its update is not work that can be divided.
    usual = statistics.median_low(case.each("optimizer").tolist())
    gain = case.gain((1 - 1 / case.judged.generation.workers) * usual)
    return Advice("--update sharded", gain) if case.replicated else None


def _buckets(case: Case) -> Advice | None:
    """Advise smaller buckets, to hide all-reduces behind the backward of the last micro-batch."""
    size = sum(case.begin.buckets)
    if not case.sends or len(case.begin.buckets) != 1 or size < _BUCKETS * _LEAST_BUCKET:
        return None
    behind = case.each("backward").min() / max(1.0, *(place.pieces for place in case.places))
    gain = case.less(min(behind, case.sums * (1 - 1 / _BUCKETS)))
    return Advice(f"--bucket-mb {size / _BUCKETS / 2**20:.2g}", gain)


def _compress(case: Case) -> Advice | None:
    hidden = min(place.hidden_each or 0.0 for place in case.places)
    gain = case.less(case.sums - max(0.0, (case.sums + hidden) / 2 - hidden))
    return (
        Advice("--compress bf16", gain, "it rounds gradients", changes=True)
        if case.may_change
        else None
    )


def _less_often(case: Case) -> Advice | None:
    gain = case.less(case.sums * 7 / 8)
    return (
        Advice("--sync-every 8", gain, "it changes what is trained", changes=True)
        if case.may_change
        else None
    )


def _larger_batch(case: Case) -> Advice | None:
    if case.sums == 0:
        return None
    remark = "it halves the number of all-reduces, and changes what is trained"
    return Advice(
        f"a global batch of {2 * case.begin.global_batch}",
        case.less(case.sums / 2),
        remark,
        changes=True,
    )


_RULES = (_cores, _loader, _balance, _sharded, _buckets, _compress, _less_often, _larger_batch)
