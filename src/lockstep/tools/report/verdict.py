"""Where the time of a training went, and what to do first, each with the measurement behind it:

    Find out why rank 3 is slow: the others wait for it in 19 % of the ranks' time (its data phase
    takes 212 ms a step, others 11).
    4 ranks: 71 % forward, backward and optimizer, 20 % waiting for late ranks, 9 % waiting for data

The largest measured loss decides, and nothing else: no option is tried, and no gain is predicted.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from lockstep.runs import Settings, Timeline
from lockstep.tools.report.rank_times import Judged, judged, milliseconds, ranks
from lockstep.tools.timing.output_files import counted

LEAST = 0.05
"""The smallest share of the time that is worth a change."""
_WHO_IS_LATE = 0.5
"""A rank is named if the others wait for it in at least this part of all their waits for a rank."""
_PHASES = ("data", "forward", "backward", "moving", "optimizer", "checks", "other")
_NAMES = {
    "useful": "forward, backward and optimizer",
    "late": "waiting for late ranks",
    "data": "waiting for data",
    "communication": "exposed communication",
    "checks": "checks",
    "other": "other",
}
Cause = Literal["data", "late", "communication", "restarts", "nothing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DoFirst:
    """What to do first."""

    cause: Cause
    """The largest loss."""
    share: float
    """Its share of the ranks' time; of the steps for "restarts", where steps are computed again."""
    sentence: str
    rank: int | None = None
    """The rank, or on a mesh the replica, that the others wait for."""
    phase: str | None = None
    """The phase in which it is slower than the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on the longest stretch without a restart."""

    ranks: int
    first: int
    last: int
    """The last of the judged steps; `first` is the first."""
    shares: Mapping[str, float]
    """Shares of all ranks' time by name; they add up to 1."""
    do_first: DoFirst
    notes: tuple[str, ...]
    """Sentences that the reader needs to interpret the figures."""

    def parts(self) -> list[tuple[int, str]]:
        """Return each share in per cent and in words, without those below 1 %."""
        percents = {_NAMES[name]: round(100 * share) for name, share in self.shares.items()}
        return [(percent, words) for words, percent in percents.items() if percent]

    def reasons(self) -> list[str]:
        """Say in one line where the time went, then each note."""
        parts = ", ".join(f"{percent} % {words}" for percent, words in self.parts())
        return [f"{counted(self.ranks, 'rank')}: {parts}", *self.notes]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentences": [self.do_first.sentence, *self.reasons()]}


def verdict(timeline: Timeline, settings: Settings | None = None) -> Verdict | None:
    """Return the verdict; None if no step was recorded. `settings` are those of the run."""
    judged_run = judged(timeline.longest, settings)
    if judged_run is None:
        return None
    shares = shares_of(judged_run)
    return Verdict(
        ranks=judged_run.start.workers,
        first=judged_run.first,
        last=judged_run.last,
        shares=shares,
        do_first=_do_first(timeline, judged_run, shares),
        notes=tuple(_notes(timeline, judged_run)),
    )


def shares_of(judged: Judged) -> dict[str, float]:
    """Return the shares of all ranks' time, by the names in _NAMES."""
    late = sum(judged.lost_to.values())
    seconds = {
        "useful": judged.total("forward", "backward", "optimizer"),
        "late": late,
        "data": judged.total("data"),
        "communication": judged.total("exposed") - late,
        "checks": judged.total("checks"),
        "other": judged.total("other"),
    }
    if judged.start.workers == 1:  # nobody to communicate with
        seconds["other"] += seconds.pop("communication")
    total = sum(seconds.values()) or 1.0
    return {name: value / total for name, value in seconds.items()}


def _do_first(timeline: Timeline, judged: Judged, shares: Mapping[str, float]) -> DoFirst:
    if judged.first == judged.last:
        sentence = f"Train more steps: only step {judged.first} was recorded, and it warms up."
        return DoFirst(cause="nothing", share=1.0, sentence=sentence)
    again = steps_again(timeline)
    losses: dict[Cause, float] = {
        "data": shares["data"],
        "late": shares["late"],
        "communication": shares.get("communication", 0.0),
        "restarts": again,
    }
    cause = max(losses, key=lambda name: losses[name])
    share = losses[cause]
    percent = f"{100 * share:.0f} %"
    if share < LEAST:
        sentence = (
            f"Change nothing first: {_NAMES['useful']} take {100 * shares['useful']:.0f} % of the"
            f" ranks' time, and no loss takes {100 * LEAST:.0f} %."
        )
        return DoFirst(cause="nothing", share=shares["useful"], sentence=sentence)
    if cause == "late":
        return _late(judged, share, percent)
    sentences = {
        "data": (
            f"Load data faster: the ranks wait for data in {percent} of their time"
            f" ({_mean(judged, 'data')} ms a step, with --loader-workers"
            f" {judged.start.begin.loader_workers})."
        ),
        "communication": (
            f"Send less, or less often: {percent} of the ranks' time is communication that no"
            f" computation hides ({_mean(judged, 'exposed')} ms a step with waits)."
        ),
        "restarts": (
            f"Find out why the training was started {len(timeline.starts)} times: {percent} of"
            " its steps were computed again."
        ),
    }
    return DoFirst(cause=cause, share=share, sentence=sentences[cause])


def _late(judged: Judged, share: float, percent: str) -> DoFirst:
    """Name the rank that the others wait for, unless ranks share cores or are late in turn."""
    crowded = crowded_host(judged)
    if crowded is not None:
        sentence = (
            f"Start fewer ranks or threads: {crowded}, and the ranks wait for each other in"
            f" {percent} of their time."
        )
        return DoFirst(cause="late", share=share, sentence=sentence)
    rank, seconds = next(iter(judged.lost_to.items()))
    if rank not in judged.members or seconds < _WHO_IS_LATE * sum(judged.lost_to.values()):
        sentence = (
            f"Make the steps of all ranks equally long: a different rank is late in each step, and"
            f" the others wait for it in {percent} of their time."
        )
        return DoFirst(cause="late", share=share, sentence=sentence)
    slow = judged.members[rank]
    others = [times for number, times in judged.members.items() if number != rank]
    usual = {}
    for phase in _PHASES:
        usual[phase] = statistics.median_low([times.per_step(phase) for times in others])
    phase = max(_PHASES, key=lambda name: slow.per_step(name) - usual[name])
    sentence = (
        f"Find out why {judged.name(rank)} is slow: the others wait for it in"
        f" {100 * seconds / (judged.total('seconds') or 1):.0f} % of the ranks' time (its {phase} phase takes"
        f" {milliseconds(slow.per_step(phase))} ms a step, others {milliseconds(usual[phase])})."
    )
    return DoFirst(cause="late", share=share, sentence=sentence, rank=rank, phase=phase)


def crowded_host(judged: Judged) -> str | None:
    """Describe a host with fewer cores than threads of ranks; None if there is none."""
    begins = [lane.begin for lane in judged.start.lanes.values() if lane.begin.device == "cpu"]
    count = Counter(begin.host for begin in begins)
    for begin in begins:
        ranks_here = count[begin.host]
        if begin.cores and ranks_here * begin.threads > begin.cores:
            return (
                f"{counted(ranks_here, 'rank')} of {counted(begin.threads, 'thread')} share the"
                f" {counted(begin.cores, 'core')} of {begin.host}"
            )
    return None


def steps_again(timeline: Timeline) -> float:
    """Return the share of computed steps that a later start computed again."""
    starts = timeline.starts
    again = sum(max(0, before.last - after.step) for before, after in pairwise(starts))
    computed = sum(start.last - start.step for start in starts)
    return again / max(1, computed)


def _mean(judged: Judged, phase: str) -> str:
    """Return the milliseconds a step of the mean rank in this phase."""
    return milliseconds(
        statistics.fmean(times.per_step(phase) for times in judged.members.values())
    )


def _notes(timeline: Timeline, judged: Judged) -> Iterator[str]:
    start = judged.start
    if len(timeline.starts) > 1:
        yield (
            f"The training was started {len(timeline.starts)} times. The figures are of the"
            f" longest stretch: steps {judged.first} to {judged.last}, on"
            f" {counted(start.workers, 'rank')}."
        )
    if start.missing:
        yield (
            f"{ranks(start.missing).capitalize()} of {start.workers} left no record: the"
            " figures are of the others."
        )
    if timeline.unread:
        lines = sum(timeline.unread.values())
        yield (
            f"{counted(lines, 'line')} of {ranks(sorted(timeline.unread))} could not be read and"
            f" {'are' if lines > 1 else 'is'} left out."
        )
    if judged.alone and start.workers > 1:
        yield f"Ranks do not wait for each other in a step ({judged.start.begin.method})."
