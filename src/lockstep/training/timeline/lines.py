"""The lines of RUN/anatomy/rank-R.jsonl, one dataclass a kind; times in seconds, sizes in bytes.

The file may come from a killed process, another version, or anywhere: a line that is not plainly
one of these is none.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

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
        line: Line = _read(kind, found)
        return line
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read(kind: Any, value: Any) -> Any:
    """`value`, as JSON has it, as a `kind`. Raises one of the errors above where it is not
    plainly that.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record(kind, value)
    if origin in (Union, UnionType):
        return None if value is None else _read(inside[0], value)
    if origin is tuple:
        kinds = [inside[0]] * len(value) if inside[-1] is ... else inside
        return tuple(_read(each, part) for each, part in zip(kinds, value, strict=True))
    if origin is Mapping:
        return {
            _read(inside[0], int(key) if inside[0] is int else key): _read(inside[1], part)
            for key, part in value.items()
        }
    if kind is str:
        return str(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int if kind is int else int | float)
        or not math.isfinite(value)
    ):
        raise ValueError(f"{value!r} is no number")
    if value < 0 and kind != Moment:
        raise ValueError(f"{value} is negative")
    return value if kind is int else float(value)


def _record(kind: Any, values: Any) -> Any:
    """Fields that have a default may be missing."""
    needed = [
        each.name
        for each in dataclasses.fields(kind)
        if each.name in values or not _has_default(each)
    ]
    return kind(**{name: _read(_hints(kind)[name], values[name]) for name in needed})


def _has_default(each: dataclasses.Field[Any]) -> bool:
    return (
        each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING
    )
