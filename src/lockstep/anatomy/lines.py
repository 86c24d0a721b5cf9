"""The lines of RUN/anatomy/rank-R.jsonl, one dataclass a kind; times in seconds, sizes in bytes.

The file may come from a killed process, another version, or anywhere: a line that is not plainly one of these is none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "checks", "other")
"""What a step's wall time is made of: they add up to it."""

T = TypeVar("T")


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
    at: float
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
class Steps:
    """Sums over the optimizer steps `first`..`last`, counted from 1."""

    first: int
    last: int
    seconds: float
    """Wall time: the sum of `phases`."""
    phases: Mapping[str, float]
    hidden: float | None
    """Communication that went on behind the computation; part of no phase. None where it is not known: on GPUs."""
    moving: float
    """Of `exposed`: this rank's own work, copying, adding, sending."""
    waits: float
    """Of `exposed`: until others, or the network, were done."""
    lost: Mapping[int, float]
    """Of `waits`: for a rank that came later, by that rank."""
    micro_batches: int
    samples: int
    spans: tuple[tuple[str, float, float], ...] = ()
    """phase, from, to; on the rank's monotonic clock. Of the phases, "exposed" is told as "moving" and "waits"."""
    buckets: tuple[tuple[int, float, float | None], ...] = ()
    """index, when it left this rank, when its sum was there (None: not known)."""

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
class Link:
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
class Links:
    step: int
    to: tuple[Link, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Of one rank, in bytes; None where the device does not say."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    peak: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """A rank has left as it should. One that was killed leaves none."""

    step: int


Line = Begin | Steps | Pause | Links | Memory | End


def parse(text: str) -> Line | None:
    """One line of the file; None where it is of another kind or damaged."""
    try:
        found = json.loads(text)
        return _KINDS[found["kind"]](found)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _begin(found: Mapping[str, Any]) -> Begin:
    numbers = ("rank", "workers", "node", "step", "micro_batch", "global_batch", "loader_workers", "threads", "cores")
    texts = ("host", "device", "reduction", "method")
    values: dict[str, Any] = {name: _whole(found[name]) for name in numbers} | {name: str(found[name]) for name in texts}
    return Begin(at=_real(found["at"]), buckets=tuple(_whole(size) for size in found["buckets"]), **values)


def _steps(found: Mapping[str, Any]) -> Steps:
    first, last = _whole(found["first"]), _whole(found["last"])
    if not 1 <= first <= last:
        raise ValueError
    return Steps(
        first=first,
        last=last,
        seconds=_time(found["seconds"]),
        phases={phase: _time(found[phase]) for phase in PHASES},
        hidden=_or_none(_time, found["hidden"]),
        **{name: _time(found[name]) for name in ("moving", "waits")},
        lost={_whole(int(rank)): _time(seconds) for rank, seconds in (found.get("lost") or {}).items()},
        micro_batches=_whole(found["micro_batches"]),
        samples=_whole(found["samples"]),
        spans=tuple((str(name), _real(began), _real(ended)) for name, began, ended in found.get("spans") or ()),
        buckets=tuple((_whole(index), _real(left), _or_none(_real, done)) for index, left, done in found.get("buckets") or ()),
    )


def _pause(found: Mapping[str, Any]) -> Pause:
    return Pause(what=str(found["what"]), step=_whole(found["step"]), seconds=_time(found["seconds"]))


def _links(found: Mapping[str, Any]) -> Links:
    return Links(step=_whole(found["step"]), to=tuple(_link(each) for each in found["to"]))


def _link(found: Mapping[str, Any]) -> Link:
    times = {name: _time(found[name]) for name in ("rtt", "busy", "rate")}
    return Link(
        here=str(found["here"]), peer=str(found["peer"]), sent=_whole(found["sent"]), retransmitted=_whole(found["retransmitted"]), **times
    )


def _memory(found: Mapping[str, Any]) -> Memory:
    values = {name: _whole(found[name]) for name in ("parameters", "gradients", "optimizer")}
    return Memory(activations=_or_none(_whole, found.get("activations")), peak=_or_none(_whole, found.get("peak")), **values)


def _end(found: Mapping[str, Any]) -> End:
    return End(step=_whole(found["step"]))


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], Line]] = {
    "begin": _begin,
    "steps": _steps,
    "pause": _pause,
    "links": _links,
    "memory": _memory,
    "end": _end,
}


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError
    return value


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _time(value: Any) -> float:
    """Seconds are differences of a monotonic clock: a negative one is damage."""
    if _real(value) < 0:
        raise ValueError
    return float(value)


def _or_none(read: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else read(value)
