"""From the files of a run directory to an `Anatomy`: who took part from one start to the next, and
which steps all of them tell of.

A line of RUN/anatomy/rank-R.jsonl is one dataclass a kind; times in seconds, sizes in bytes. The
file may come from a killed process, another version, or anywhere: a line that is not plainly one of
these is none. Torn lines, missing ranks and restarts are told, never raised.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from lockstep.training.metrics import typed

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "checks", "other")
"""What a step's wall time is made of: they add up to it."""

Moment = Annotated[float, "on the rank's monotonic clock"]
"""Other floats are no less than 0: times are differences of that clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """A rank starts, or starts again."""

    rank: int
    workers: int
    host: str
    node: int
    device: str
    step: int
    """From which it goes on: the steps that were done before."""
    at: Moment
    """On this process's monotonic clock, which processes of one host share."""
    reduction: str
    method: str
    buckets: tuple[int, ...]
    """Bytes of each."""
    micro_batch: int
    global_batch: int
    loader_workers: int
    threads: int
    cores: int
    """That its host gives to all of its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsLine:
    """Sums over the optimizer steps `first`..`last`, counted from 1."""

    first: int
    last: int
    seconds: float
    """Wall time: the sum of `phases`."""
    phases: Mapping[str, float]
    hidden: float | None
    """Communication that went on behind the computation; part of no phase. None where it is not
    known: on GPUs.
    """
    moving: float
    """Of `exposed`: this rank's own work, copying, adding, sending."""
    waits: float
    """Of `exposed`: until others, or the network, were done."""
    micro_batches: int
    samples: int
    lost: Mapping[int, float] = field(default_factory=dict)
    """Of `waits`: for a rank that came later, by that rank."""
    spans: tuple[tuple[str, Moment, Moment], ...] = ()
    """phase, from, to; on the rank's monotonic clock. Of the phases, "exposed" is told as
    "moving" and "waits".
    """
    buckets: tuple[tuple[int, Moment, Moment | None], ...] = ()
    """index, when it left this rank, when its sum was there (None: not known)."""

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(f"steps {self.first} to {self.last}")

    @property
    def place(self) -> tuple[int, int]:
        return self.first, self.last

    def total(self, name: str) -> float:
        """Of a phase, or of another number of the line."""
        return float(self.phases[name] if name in self.phases else getattr(self, name))

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def busy(self) -> float:
        """What this rank would have taken if nobody had kept it waiting."""
        return self.seconds - self.waits


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Time between two steps that belongs to neither: an evaluation, a checkpoint."""

    what: str
    step: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkUse:
    """A rank's TCP connections from one address to another, since the line before."""

    here: str
    peer: str
    rtt: float
    busy: float
    """Seconds in which there was something on its way."""
    sent: int
    retransmitted: int
    rate: float
    """Bytes a second, as the kernel last saw them arrive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksLine:
    step: int
    to: tuple[LinkUse, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """Of one rank, in bytes; None where the device does not say."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None = None
    peak: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """A rank has left as it should. One that was killed leaves none."""

    step: int


Line = Begin | StepsLine | Pause | LinksLine | MemoryLine | End
_KINDS: Mapping[str, type[Line]] = {
    "begin": Begin,
    "steps": StepsLine,
    "pause": Pause,
    "links": LinksLine,
    "memory": MemoryLine,
    "end": End,
}


def parse(text: str) -> Line | None:
    """One line of the file; None where it is of another kind or damaged."""
    try:
        found = json.loads(text)
        kind = _KINDS[found["kind"]]
        if kind is StepsLine:
            found["phases"] = {phase: found[phase] for phase in PHASES}
        line: Line = typed(kind, found)
        return line
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


FOLDER = "anatomy"
_OPENING = '{"kind":'
_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One rank, from a start to its end or the next start."""

    begin: Begin
    steps: tuple[StepsLine, ...] = ()
    pauses: tuple[Pause, ...] = ()
    links: tuple[LinksLine, ...] = ()
    memory: MemoryLine | None = None
    """The latest."""
    ended: bool = False
    """Whether the rank left as it should, and was not killed."""

    @classmethod
    def of(cls, begin: Begin, lines: Sequence[Line]) -> Lane:
        """What followed `begin` in the rank's file."""
        return cls(
            begin=begin,
            steps=tuple(each for each in lines if isinstance(each, StepsLine)),
            pauses=tuple(each for each in lines if isinstance(each, Pause)),
            links=tuple(each for each in lines if isinstance(each, LinksLine)),
            memory=next((each for each in reversed(lines) if isinstance(each, MemoryLine)), None),
            ended=bool(lines) and isinstance(lines[-1], End),
        )

    @property
    def seconds(self) -> float:
        """In steps."""
        return sum(each.seconds for each in self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The ranks that started together. Some may have left no file."""

    workers: int
    step: int
    """From which it went on."""
    lanes: Mapping[int, Lane]
    """By rank, in order; never empty."""

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.workers) if rank not in self.lanes)

    @property
    def begin(self) -> Begin:
        """What all ranks have in common, from the first that left a file."""
        return next(iter(self.lanes.values())).begin

    @property
    def last(self) -> int:
        """The last step that a rank tells of, or the one from which it went on."""
        return max(
            (each.last for lane in self.lanes.values() for each in lane.steps), default=self.step
        )

    @property
    def seconds(self) -> float:
        """In steps, of the rank that was longest in them."""
        return max(lane.seconds for lane in self.lanes.values())

    def paused(self, what: str) -> float:
        """Seconds in evaluations, say, of the rank that was longest in them: all ranks take
        part.
        """
        return max(
            sum(pause.seconds for pause in lane.pauses if pause.what == what)
            for lane in self.lanes.values()
        )

    def common(self) -> Generation:
        """With only those lines that every rank has; a killed rank's last ones are missing.
        Ranks that take different steps keep all of theirs.
        """
        kept = set.intersection(
            *({each.place for each in lane.steps} for lane in self.lanes.values())
        )
        if not kept:
            return self
        lanes = {}
        for rank, lane in self.lanes.items():
            lanes[rank] = replace(
                lane, steps=tuple(each for each in lane.steps if each.place in kept)
            )
        return replace(self, lanes=lanes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """Of a whole run. Never without a generation."""

    generations: tuple[Generation, ...]
    """In order; the next begins where ranks were started again."""
    unread: Mapping[int, int]
    """Lines in the middle of a rank's file that could not be read, by rank."""

    @property
    def longest(self) -> Generation:
        """In which most time was spent in steps; the latest of equals."""
        return max(reversed(self.generations), key=lambda each: each.seconds)


def join(lanes: Mapping[int, Sequence[Lane]]) -> tuple[Generation, ...]:
    """`lanes` by rank, each rank's in order. Lanes belong together that began alike: as many
    workers, the same step, for the same time.

    (A run that dies twice before its next checkpoint begins at one step twice.)
    """
    order: list[tuple[int, int, int]] = []
    found: dict[tuple[int, int, int], dict[int, Lane]] = {}
    # Who was there most often gives the order.
    for rank in sorted(lanes, key=lambda each: (-len(lanes[each]), each)):
        seen: Counter[tuple[int, int]] = Counter()
        after = 0
        for lane in lanes[rank]:
            began = (lane.begin.workers, lane.begin.step)
            key = (*began, seen[began])
            seen[began] += 1
            if key not in found:
                order.insert(after, key)
            after = order.index(key) + 1
            found.setdefault(key, {})[rank] = lane
    return tuple(
        Generation(
            workers=key[0], step=key[1], lanes=_hosts_apart(dict(sorted(found[key].items())))
        )
        for key in order
    )


def _hosts_apart(lanes: dict[int, Lane]) -> dict[int, Lane]:
    """Containers may all have one name: hosts of one name get their numbers too."""
    nodes: dict[str, set[int]] = {}
    for lane in lanes.values():
        nodes.setdefault(lane.begin.host, set()).add(lane.begin.node)
    return {
        rank: (
            replace(
                lane, begin=replace(lane.begin, host=f"{lane.begin.host} (node {lane.begin.node})")
            )
            if len(nodes[lane.begin.host]) > 1
            else lane
        )
        for rank, lane in lanes.items()
    }


def read(run: Path) -> Anatomy | None:
    """Of the run directory `run`; None where no rank has left one."""
    lanes: dict[int, list[Lane]] = {}
    unread: dict[int, int] = {}
    for file in sorted((run / FOLDER).glob("rank-*.jsonl")):
        match = _FILE.fullmatch(file.name)
        if match is None:
            continue
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # told as a missing rank
        rank = int(match[1])
        found, damaged = _lanes(text, rank)
        if found:
            lanes[rank] = found
        if damaged:
            unread[rank] = damaged
    generations = join(lanes)
    return Anatomy(generations=generations, unread=unread) if generations else None


def _lanes(text: str, rank: int) -> tuple[list[Lane], int]:
    """A file's lanes, and how many of its lines could not be read. Half a line at the very end
    is what a killed process leaves.
    """
    whole, _, _ = text.rpartition("\n")
    lines = [line for each in whole.splitlines() if each.strip() for line in _parsed(each)]
    starts = [
        place for place, line in enumerate(lines) if isinstance(line, Begin) and line.rank == rank
    ]
    ends = [*starts, len(lines)][1:]
    lanes = []
    for start, end in zip(starts, ends, strict=True):
        begin = lines[start]
        assert isinstance(begin, Begin)
        lanes.append(Lane.of(begin, [line for line in lines[start + 1 : end] if line is not None]))
    return lanes, lines.count(None)


def _parsed(text: str) -> list[Line | None]:
    """The line; or what a rank wrote that was started again behind half a line of the one that
    was killed: the half is damage, the rest counts.
    """
    line = parse(text)
    again = text.rfind(_OPENING)
    return [line] if line is not None or again <= 0 else [None, parse(text[again:])]
