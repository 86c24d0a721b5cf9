"""What would make a training's steps shorter, and by how much, where that can be computed.

A step is taken to last as long as its slowest rank is busy, and what else all ranks wait for. An option changes how long some of them are busy; the
rest stays. Nothing is advised that is in use, that the method cannot have, or that would gain less than a few per cent.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.measure.verdict.judged import Judged, Place
from lockstep.measure.verdict.stragglers import Straggler
from lockstep.settings import Settings

_LEAST = 0.05
"""Gain below which a change is not worth advising."""
_LEAST_OTHER = 0.15
"""The same for what changes the training."""
_MOST_LOADERS = 16
_MOST = 3
"""Advice in one verdict."""
_BUCKETS = 4
"""Parts of which the last cannot be hidden."""
_LEAST_BUCKET = 2**20
"""Bytes: smaller ones are all latency."""
SHARED = "shared memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    option: str
    """As it is typed."""
    gain: float | None
    """Share of samples/s that it would bring; None where nothing can be computed."""
    remark: str = ""
    """What must be known before it is used."""
    changes: bool = False
    """Whether it makes another training of it."""

    def __str__(self) -> str:
        about = (
            "" if self.gain is None else f"about +{100 * self.gain:.0f} %" if self.gain < 1 else f"about {1 + self.gain:.2g} times as fast"
        )
        remarks = "; ".join(filter(None, (about, self.remark)))
        return f"{self.option} ({remarks})" if remarks else self.option


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The model of a step: seconds that each place is busy, and what is added to the longest of them."""

    places: Sequence[Place]
    busy: Sequence[float]
    common: float

    @classmethod
    def of(cls, judged: Judged) -> Steps:
        places = list(judged.places.values())
        busy = [place.busy for place in places]
        step = sum(place.each("seconds") for place in places) / len(places)
        return cls(places=places, busy=busy, common=max(0.0, step - max(busy)))

    @property
    def seconds(self) -> float:
        return max(self.busy) + self.common

    def gain(self, saved: Callable[[Place], float], *, least: float = 0.0) -> float:
        """Of samples/s, where each place saves so many seconds, and the step lasts `least` anyway."""
        busy = max(time - saved(place) for time, place in zip(self.busy, self.places, strict=True))
        return self.seconds / max(busy + self.common, least, 1e-9) - 1


def advice(judged: Judged, behind: Sequence[Straggler], settings: Settings | None) -> list[Advice]:
    """Most gain first, what cannot be computed last; nothing from a single step."""
    if judged.first == judged.last:
        return []
    found = [_cores(judged), _loader(judged), _balance(judged, behind, settings), _sharded(judged)]
    found += _network(judged, settings)
    worth = [each for each in found if each is not None and _is_worth(each)]
    return sorted(worth, key=lambda each: -(each.gain or 0.0))[:_MOST]


def _is_worth(each: Advice) -> bool:
    return each.gain is None or each.gain >= (_LEAST_OTHER if each.changes else _LEAST)


def crowded(judged: Judged) -> dict[str, tuple[int, int, int]]:
    """Hosts whose ranks have less than a core for each of their threads: host -> ranks, threads of each, cores."""
    lanes = [lane.begin for lane in judged.generation.lanes.values() if lane.begin.device == "cpu"]
    ranks = Counter(begin.host for begin in lanes)
    found = {begin.host: (ranks[begin.host], begin.threads, begin.cores) for begin in lanes}
    return {host: (count, threads, cores) for host, (count, threads, cores) in found.items() if cores and count * threads > cores}


def _cores(judged: Judged) -> Advice | None:
    """Where ranks share cores. What they would do alone is not known from here."""
    hosts = crowded(judged)
    if len(hosts) != 1 or len({lane.begin.host for lane in judged.generation.lanes.values()}) != 1:
        return None
    ((ranks, threads, cores),) = hosts.values()
    if ranks <= cores:
        return Advice(option=f"--threads {cores // ranks}", gain=None, remark=f"{ranks} x {threads} threads share {cores} cores")
    return Advice(option=f"--workers {cores}", gain=None, remark="a core for each")


def _loader(judged: Judged) -> Advice | None:
    """As many processes as would keep up with the step that is left without the loader."""
    steps, begin = Steps.of(judged), judged.generation.begin
    longest = max(place.each("data") for place in steps.places)
    left = max(steps.seconds / (1 + steps.gain(lambda place: place.each("data"))), 1e-9)
    waited = begin.loader_workers * steps.seconds if begin.loader_workers else longest
    workers = max(math.ceil(waited / left - 1e-9), begin.loader_workers + 1)
    if workers > _MOST_LOADERS:
        workers = _MOST_LOADERS
    if workers <= begin.loader_workers:
        return None
    gain = steps.gain(lambda place: place.each("data"), least=waited / workers)
    if gain < _LEAST:
        return None
    ranks = Counter(lane.begin.host for lane in judged.generation.lanes.values())
    if begin.device == "cpu" and max(ranks.values()) >= begin.cores:
        remark = "if the loader waits for storage: no core is free for it"
        return Advice(option=f"--loader-workers {workers}", gain=None, remark=remark) if gain >= _LEAST_OTHER else None
    return Advice(option=f"--loader-workers {workers}", gain=gain)


def _balance(judged: Judged, behind: Sequence[Straggler], settings: Settings | None) -> Advice | None:
    """Micro-batches in proportion to speed, where a rank is slower at equal work."""
    slow = any(each.cause in ("forward", "backward", "computation") for each in behind)
    begin = judged.generation.begin
    places = list(judged.places.values())
    whole = round(sum(place.pieces for place in places))
    if not slow or judged.alone or judged.mesh is not None or whole <= len(places):
        return None
    if settings is not None and settings.balance is not None:
        return None
    if begin.micro_batch and -(-begin.global_batch // begin.micro_batch) % len(places) == 0 and len({p.micro_batches for p in places}) > 1:
        return None  # they would be equal if they were not balanced
    steps = Steps.of(judged)
    piece = [place.computing / place.pieces if place.pieces else math.inf for place in places]
    rest = [busy - place.computing for busy, place in zip(steps.busy, places, strict=True)]
    dealt = deal(whole, piece, rest)
    longest = max(each + count * time if count else each for each, count, time in zip(rest, dealt, piece, strict=True))
    gain = steps.seconds / (longest + steps.common) - 1
    return Advice(option="--balance auto", gain=gain)


def deal(count: int, seconds: Sequence[float], rest: Sequence[float]) -> list[int]:
    """`count` micro-batches over ranks that take `seconds` for one and `rest` besides: each goes to who would be done first."""
    dealt = [0] * len(seconds)
    for _ in range(count):
        first = min(range(len(seconds)), key=lambda rank: rest[rank] + (dealt[rank] + 1) * seconds[rank])
        dealt[first] += 1
    return dealt


def _sharded(judged: Judged) -> Advice | None:
    """Each rank updates its share of the parameters, for the same bytes."""
    if judged.generation.begin.method != "replicated" or len(judged.places) == 1 or judged.mesh is not None:
        return None
    usual = statistics.median_low([place.each("optimizer") for place in judged.places.values()])
    saved = (1 - 1 / judged.generation.workers) * usual  # what holds one rank up in its update is no work that could be shared
    return Advice(option="--update sharded", gain=Steps.of(judged).gain(lambda place: saved))


def _network(judged: Judged, settings: Settings | None) -> list[Advice | None]:
    """Communication that is not hidden: hide it, or send less of it, or less often."""
    begin = judged.generation.begin
    if judged.alone or len(judged.places) == 1 or judged.mesh is not None:
        return []
    steps = Steps.of(judged)
    places = steps.places
    sums = min(place.each("exposed") - sum(place.lost.values()) / place.steps for place in places)
    hidden = min(place.hidden_each or 0.0 for place in places)
    if sums <= 0:
        return []
    pieces = max(place.pieces for place in places)
    found: list[Advice | None] = []
    if not begin.reduction.startswith(SHARED):
        size = sum(begin.buckets)
        behind = min(place.each("backward") for place in places) / max(1.0, pieces)
        if begin.method == "replicated" and len(begin.buckets) == 1 and size >= _BUCKETS * _LEAST_BUCKET:
            hides = min(behind, sums * (1 - 1 / _BUCKETS))
            found.append(Advice(option=f"--bucket-mb {size / _BUCKETS / 2**20:.2g}", gain=_less(steps, hides)))
        if begin.method == "replicated" and settings is not None and settings.compress is None and not settings.exact:
            left = max(0.0, (sums + hidden) / 2 - hidden)
            found.append(Advice(option="--compress bf16", gain=_less(steps, sums - left), remark="gradients are rounded", changes=True))
            every = _less(steps, sums * 7 / 8)
            found.append(Advice(option="--sync-every 8", gain=every, remark="another training", changes=True))
    twice = 2 * steps.seconds / max(2 * steps.seconds - sums, 1e-9) - 1
    more = f"a global batch of {2 * begin.global_batch}"
    found.append(Advice(option=more, gain=twice, remark="half as many sums; another training", changes=True))
    return found


def _less(steps: Steps, seconds: float) -> float:
    return steps.seconds / max(steps.seconds - seconds, 1e-9) - 1
