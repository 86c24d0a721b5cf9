"""Where the time of a step goes on this rank: a clock of phases, and the totals of each step that
has ended.

    phase   data, forward, backward, reduce, optimizer, checks; "loop" is the user's code between
            steps; evaluate and checkpoint are pauses
    waits   time within a phase in which this rank could only wait for other ranks or the network

The clock always runs. Beginning a phase costs a fraction of a microsecond on the main thread, and
takes no lock. On a GPU the host runs ahead of the work, so a phase ends where its work ends in the
device's stream. The clock records events there, and reads them once a later step finds them
complete.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PHASES = (
    "start",
    "data",
    "forward",
    "backward",
    "reduce",
    "optimizer",
    "checkpoint",
    "evaluate",
    "loop",
    "checks",
    "end",
)
INDEX = {name: number for number, name in enumerate(PHASES)}
PAUSES = ("checkpoint", "evaluate")
_NONE = 0  # no wait is under way
_SECOND = 1e9  # ns
_MOST = 64  # maximum number of steps with incomplete events; with more, nobody reads the clock
_MOST_MARKS = 10_000  # maximum number of marks of a step


class PhaseSpan(NamedTuple):
    """A piece of a step, in seconds of this process's monotonic clock."""

    phase: str
    waits: bool
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """The times of one optimizer step on this rank, in seconds. All of them except `hidden`,
    `evaluate` and `checkpoint` add up to `seconds`.
    """

    step: int
    """The number of the step, from 1. With a parameter server each rank counts its own steps."""
    data: float
    forward: float
    backward: float
    moving: float
    """This rank's own work in communication that does not overlap with computation: adding,
    copying, sending.
    """
    waits: float
    """Time spent waiting for other ranks or the network."""
    optimizer: float
    checks: float
    other: float
    """The user's own code between steps, and writing records."""
    hidden: float | None = 0.0
    """Communication during this rank's computation; None if it is not known."""
    evaluate: float = 0.0
    checkpoint: float = 0.0
    spans: Sequence[PhaseSpan] = ()
    """The pieces of the step, if they were asked for and are known."""

    @property
    def exposed(self) -> float:
        """Communication that did not overlap with this rank's computation."""
        return self.moving + self.waits

    @property
    def busy(self) -> float:
        """Time spent computing the model: forward and backward."""
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        return self.data + self.busy + self.exposed + self.optimizer + self.checks + self.other


class _Mark(NamedTuple):
    """The begin of a piece of time: its phase, and whether the rank waits."""

    phase: int
    waits: bool
    ns: int
    event: Any  # a torch.cuda.Event; None without a GPU


class StepClock:
    """The clock of this process. Its main thread calls `enter` and `waits` through status.py; `end`
    ends a step, and `finished` returns the times of ended steps.

    `event` records an event in a device's stream. With it, phases and spans are those of the
    device, counted from where the host began the step.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self._owner = threading.get_ident()
        self._event = event
        self.phase, self._since, self._began_to_wait = INDEX["loop"], time.monotonic_ns(), _NONE
        self._spent, self._waited = [0] * len(PHASES), [0] * len(PHASES)
        self._marks: list[_Mark] | None = None
        self._keeps = False  # whether to keep this step's spans
        # steps that have ended on the host, and not yet on the device: step, marks, hidden, keep
        # spans
        self._open: deque[tuple[int, list[_Mark], float | None, bool]] = deque(maxlen=_MOST)
        self._finished: list[StepTimes] = []
        self.begin()

    @property
    def mine(self) -> bool:
        """Whether the current thread is the one that reports to this clock."""
        return threading.get_ident() == self._owner

    def enter(self, phase: int, now: int) -> None:
        self._spent[self.phase] += now - self._since
        self.phase, self._since = phase, now
        if self._marks is not None:
            self._mark(now)

    def waits(self, begun: bool, now: int) -> None:
        if begun:
            self._began_to_wait = now
        elif self._began_to_wait != _NONE:
            self._waited[self.phase] += now - self._began_to_wait
            self._began_to_wait = _NONE
        if self._marks is not None:
            self._mark(now)

    def begin(self, *, spans: bool = False) -> None:
        """Begin a step: the time until now belongs to no step. `spans`: keep the position of each
        piece of the step.
        """
        now = time.monotonic_ns()
        self._since, self._began_to_wait = now, _NONE
        self._spent, self._waited = [0] * len(PHASES), [0] * len(PHASES)
        self._keeps = spans
        self._marks = [] if spans or self._event is not None else None
        if self._marks is not None:
            self._mark(now)

    def end(self, step: int, hidden: float | None = 0.0, *, spans: bool = False) -> None:
        """End a step and begin the next. `hidden`: seconds of communication during computation.
        `spans`: keep the spans of the next step.
        """
        self.enter(self.phase, time.monotonic_ns())
        marks = self._marks
        if self._event is None:
            kept = () if marks is None else _spans(marks)
            self._finished.append(_times(step, self._spent, self._waited, hidden, kept))
        elif marks is not None:
            self._open.append((step, marks, hidden, self._keeps))
        self.begin(spans=spans)

    def paused(self) -> dict[str, float]:
        """Return the host's seconds of each kind of pause since the last step ended."""
        self.enter(self.phase, time.monotonic_ns())
        return {name: self._spent[INDEX[name]] / _SECOND for name in PAUSES}

    def finished(self) -> list[StepTimes]:
        """Return the steps that have ended since the last call, in order. On a GPU: those whose
        work is done.
        """
        while self._open and (event := self._open[0][1][-1].event) is not None and event.query():
            step, marks, hidden, keeps = self._open.popleft()
            self._finished.append(
                _times(step, *_of_device(marks), hidden, _spans(_on_device(marks)) if keeps else ())
            )
        found, self._finished = self._finished, []
        return found

    def _mark(self, now: int) -> None:
        assert self._marks is not None
        if len(self._marks) == _MOST_MARKS:  # no step ends, so this is not a training any more
            self._marks = None
            return
        event = None
        if self._event is not None:
            event = self._event()
        self._marks.append(_Mark(self.phase, self._began_to_wait != _NONE, now, event))


def _of_device(marks: Sequence[_Mark]) -> tuple[list[int], list[int]]:
    """Return the ns spent, and the ns waited, in each phase between marks in a device's stream."""
    spent, waited = [0] * len(PHASES), [0] * len(PHASES)
    for mark, following in itertools.pairwise(marks):
        ns = round(mark.event.elapsed_time(following.event) * 1e6)
        spent[mark.phase] += ns
        waited[mark.phase] += ns if mark.waits else 0
    return spent, waited


def _on_device(marks: Sequence[_Mark]) -> list[_Mark]:
    """Return the marks at the times when the device reached them. Assumes that the device reached
    the first mark when the host recorded it.
    """
    first = marks[0]
    return [
        mark._replace(ns=first.ns + round(first.event.elapsed_time(mark.event) * 1e6))
        for mark in marks
    ]


def _spans(marks: Sequence[_Mark]) -> list[PhaseSpan]:
    """Return the pieces between the marks, with equal neighbours merged."""
    found: list[PhaseSpan] = []
    for mark, following in itertools.pairwise(marks):
        span = PhaseSpan(PHASES[mark.phase], mark.waits, mark.ns / _SECOND, following.ns / _SECOND)
        if found and found[-1].phase == span.phase and found[-1].waits == span.waits:
            span = span._replace(begin=found.pop().begin)
        found.append(span)
    return found


def _times(
    step: int,
    spent: Sequence[int],
    waited: Sequence[int],
    hidden: float | None,
    spans: Sequence[PhaseSpan],
) -> StepTimes:
    own = {name: (spent[number] - waited[number]) / _SECOND for number, name in enumerate(PHASES)}
    return StepTimes(
        step=step,
        data=own["data"],
        forward=own["forward"],
        backward=own["backward"],
        moving=own["reduce"],
        waits=sum(waited[number] for number, name in enumerate(PHASES) if name not in PAUSES)
        / _SECOND,
        optimizer=own["optimizer"],
        checks=own["checks"],
        other=own["loop"] + own["start"],
        hidden=hidden,
        evaluate=spent[INDEX["evaluate"]] / _SECOND,
        checkpoint=spent[INDEX["checkpoint"]] / _SECOND,
        spans=spans,
    )
