"""Read the files of a run directory into a `Timeline`: which ranks took part from one start to the
next, and which steps all of them have recorded.

Each kind of line of RUN/anatomy/rank-R.jsonl is one dataclass; times in seconds, sizes in bytes.
The file may come from a killed process, another version, or anywhere: a line that does not fit is
not used. Incomplete lines, missing ranks and restarts are reported, never raised.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, starmap
from pathlib import Path
from typing import Annotated

from lockstep.runtime.disk import last_lines
from lockstep.training.metrics import typed

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "checks", "other")
"""The parts of a step's wall time; they add up to it."""

Moment = Annotated[float, "on the rank's monotonic clock"]
"""All other floats are at least 0, because times are differences of that clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """A rank starts or restarts."""

    rank: int
    workers: int
    host: str
    node: int
    device: str
    step: int
    """Steps that were done before: the rank continues from here."""
    at: Moment
    """Time on the monotonic clock, which all processes of a host share."""
    method: str
    buckets: tuple[int, ...]
    """Bytes of each bucket."""
    micro_batch: int
    global_batch: int
    loader_workers: int
    threads: int
    cores: int
    """Cores that the host gives to all of its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsLine:
    """Sums over the optimizer steps `first`..`last`, counted from 1."""

    first: int
    last: int
    seconds: float
    """Wall time: the sum of `phases`."""
    phases: Mapping[str, float]
    hidden: float | None
    """Communication during computation; part of no phase. None if unknown: on GPUs."""
    moving: float
    """Part of `exposed`: this rank's own work (copying, adding, sending)."""
    waits: float
    """Part of `exposed`: waiting for other ranks or the network."""
    micro_batches: int
    samples: int
    lost: Mapping[int, float] = field(default_factory=dict)
    """Part of `waits` that a later rank caused, by that rank's number."""
    spans: tuple[tuple[str, Moment, Moment], ...] = ()
    """(phase, begin, end) on the rank's monotonic clock. The phase "exposed" is divided into
    "moving" and "waits".
    """
    buckets: tuple[tuple[int, Moment, Moment | None], ...] = ()
    """(index, when it left this rank, when its sum arrived; None: unknown)."""

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(f"steps {self.first} to {self.last}")

    @property
    def place(self) -> tuple[int, int]:
        return self.first, self.last

    def total(self, name: str) -> float:
        """Return the value of the phase, or of another field, that is called `name`."""
        if name in self.phases:
            return self.phases[name]
        return float(getattr(self, name))

    @property
    def count(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Time between two steps that belongs to neither: an evaluation, a checkpoint."""

    what: str
    step: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """Memory of one rank, in bytes; None if the device does not report it."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """A rank ended normally. A killed rank leaves no such line."""

    step: int


Line = Begin | StepsLine | Pause | MemoryLine | End
_KINDS: Mapping[str, type[Line]] = {
    "begin": Begin,
    "steps": StepsLine,
    "pause": Pause,
    "memory": MemoryLine,
    "end": End,
}


def parse(text: str | bytes) -> Line | None:
    """Parse one line of the file; None if it is damaged or of another kind."""
    try:
        record = json.loads(text)
        kind = _KINDS[record["kind"]]
        if kind is StepsLine:
            record["phases"] = {phase: record[phase] for phase in PHASES}
        line: Line = typed(kind, record)
        return line
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


FOLDER = "anatomy"
_MOST = 64 * 2**20  # bytes of a rank's file; a million steps have about 3
_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One rank, from a start to its end or the next start."""

    begin: Begin
    steps: tuple[StepsLine, ...] = ()
    pauses: tuple[Pause, ...] = ()
    memory: MemoryLine | None = None
    """The latest memory line."""
    ended: bool = False
    """Whether the rank ended normally and was not killed."""

    @classmethod
    def of(cls, begin: Begin, lines: Sequence[Line]) -> Lane:
        """Return the lane of `begin` and the lines that follow it in the rank's file."""
        memory = [line for line in lines if isinstance(line, MemoryLine)]
        return cls(
            begin=begin,
            steps=tuple(line for line in lines if isinstance(line, StepsLine)),
            pauses=tuple(line for line in lines if isinstance(line, Pause)),
            memory=memory[-1] if memory else None,
            ended=bool(lines) and isinstance(lines[-1], End),
        )

    @property
    def seconds(self) -> float:
        """Seconds in steps."""
        return sum(line.seconds for line in self.steps)

    @property
    def places(self) -> set[tuple[int, int]]:
        return {line.place for line in self.steps}

    def paused(self, kind: str) -> float:
        """Return the seconds of one kind of pause."""
        return sum(pause.seconds for pause in self.pauses if pause.what == kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The ranks that started together. Some may have left no file."""

    workers: int
    step: int
    """The step from which they continued."""
    lanes: Mapping[int, Lane]
    """Lanes by rank, in order; never empty."""

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.workers) if rank not in self.lanes)

    @property
    def begin(self) -> Begin:
        """The first line of the first rank that left a file, for what all ranks have in common."""
        return next(iter(self.lanes.values())).begin

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts, each once."""
        return list(dict.fromkeys(lane.begin.host for lane in self.lanes.values()))

    @property
    def last(self) -> int:
        """The last step that a rank has recorded, else the step from which they continued."""
        lines = chain(*(lane.steps for lane in self.lanes.values()))
        return max((line.last for line in lines), default=self.step)

    @property
    def seconds(self) -> float:
        """Seconds in steps, of the rank with the most."""
        return max(lane.seconds for lane in self.lanes.values())

    def paused(self, kind: str) -> float:
        """Return the seconds of one kind of pause, such as "evaluate", of the rank with the most.
        All ranks take part in a pause.
        """
        return max(lane.paused(kind) for lane in self.lanes.values())

    def common(self) -> Start:
        """Return it with only the lines that every rank has; a killed rank lacks the last ones. If
        the ranks have no line in common, because they take different steps, it is unchanged.
        """
        common = set.intersection(*(lane.places for lane in self.lanes.values()))
        if not common:
            return self
        lanes = {}
        for rank, lane in self.lanes.items():
            lines = tuple(line for line in lane.steps if line.place in common)
            lanes[rank] = replace(lane, steps=lines)
        return replace(self, lanes=lanes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The times of a whole run; it has at least one start."""

    starts: tuple[Start, ...]
    """In order; a new start is where the ranks are restarted."""
    unread: Mapping[int, int]
    """Lines in the middle of a rank's file that could not be read, by rank."""

    @property
    def longest(self) -> Start:
        """The start with the most time in steps; of equal ones the latest."""
        return max(reversed(self.starts), key=lambda start: start.seconds)


def join(lanes: Mapping[int, Sequence[Lane]]) -> tuple[Start, ...]:
    """Join `lanes` (by rank, each rank's in order) into starts. Lanes belong together if they
    start alike: as many workers, the same step, and the same number of earlier starts like that.

    (A run that dies twice before its next checkpoint starts at one step twice.)
    """
    order: list[tuple[int, int, int]] = []
    joined: dict[tuple[int, int, int], dict[int, Lane]] = {}
    # The rank with the most starts gives the order.
    for rank in sorted(lanes, key=lambda rank: (-len(lanes[rank]), rank)):
        seen: Counter[tuple[int, int]] = Counter()
        after = 0
        for lane in lanes[rank]:
            start = (lane.begin.workers, lane.begin.step)
            key = (*start, seen[start])
            seen[start] += 1
            if key not in joined:
                order.insert(after, key)
            after = order.index(key) + 1
            joined.setdefault(key, {})[rank] = lane
    generations = []
    for key in order:
        workers, step, _ = key
        by_rank = _hosts_apart(dict(sorted(joined[key].items())))
        generations.append(Start(workers=workers, step=step, lanes=by_rank))
    return tuple(generations)


def _hosts_apart(lanes: dict[int, Lane]) -> dict[int, Lane]:
    """Add the node number to hosts of one name: containers may all have the same name."""
    nodes = {(lane.begin.host, lane.begin.node) for lane in lanes.values()}
    counts = Counter(host for host, _ in nodes)
    renamed = dict(lanes)
    for rank, lane in lanes.items():
        begin = lane.begin
        if counts[begin.host] > 1:
            begin = replace(begin, host=f"{begin.host} (node {begin.node})")
            renamed[rank] = replace(lane, begin=begin)
    return renamed


def read(run: Path) -> Timeline | None:
    """Read the run directory `run`; None if no rank has left a file."""
    lanes: dict[int, list[Lane]] = {}
    unread: dict[int, int] = {}
    for file in sorted((run / FOLDER).glob("rank-*.jsonl")):
        match = _FILE.fullmatch(file.name)
        if match is None:
            continue
        rank = int(match[1])  # without a lane, it is reported as a missing rank
        of_rank, damaged = _lanes(last_lines(file, _MOST), rank)
        if of_rank:
            lanes[rank] = of_rank
        if damaged:
            unread[rank] = damaged
    generations = join(lanes)
    return Timeline(starts=generations, unread=unread) if generations else None


def _lanes(lines: Iterable[bytes], rank: int) -> tuple[list[Lane], int]:
    """Return a file's lanes, and how many of its lines could not be read. An incomplete line at the
    very end is not counted: a killed process leaves one, which the next start ends (anatomy.py).
    """
    damaged = 0
    starts: list[tuple[Begin, list[Line]]] = []
    for written in lines:
        if not written.endswith(b"\n") or not written.strip():
            continue
        line = parse(written)
        if line is None:
            damaged += 1
        elif isinstance(line, Begin) and line.rank == rank:
            starts.append((line, []))
        elif starts:
            starts[-1][1].append(line)
    return list(starmap(Lane.of, starts)), damaged
