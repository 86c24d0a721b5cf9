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
_START, _DATA, _FORWARD, _BACKWARD, _REDUCE, _OPTIMIZER = range(6)
_CHECKPOINT, _EVALUATE, _LOOP, _CHECKS, _END = range(6, 11)
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
    """The clock of this process. status.py writes to it, on the main thread, when a phase or a wait
    begins. `end` ends a step, and `finished` returns the times of ended steps.

    `event` records an event in a device's stream. With it, phases and spans are those of the
    device, counted from where the host began the step.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self.thread = threading.get_ident()
        """The thread that reports to this clock."""
        self._event = event
        self.phase = INDEX["loop"]
        self.since = time.monotonic_ns()
        """When the phase began, or was last added to `spent`."""
        self.spent = [0] * len(PHASES)
        """The time in each phase since the step began, in ns."""
        self._waited = [0] * len(PHASES)
        self._began_to_wait = _NONE
        self.marks: list[_Mark] | None = None
        """Where each piece of the step begins, if that is recorded."""
        self._keeps = False  # whether to keep this step's spans
        # steps that have ended on the host, and not yet on the device: step, marks, hidden, keep
        # spans
        self._open: deque[tuple[int, list[_Mark], float | None, bool]] = deque(maxlen=_MOST)
        self._finished: list[StepTimes] = []
        self.begin()

    def waits(self, begun: bool, now: int) -> None:
        if begun:
            self._began_to_wait = now
        elif self._began_to_wait != _NONE:
            self._waited[self.phase] += now - self._began_to_wait
            self._began_to_wait = _NONE
        if self.marks is not None:
            self.mark(now)

    def begin(self, *, spans: bool = False) -> None:
        """Begin a step: the time until now belongs to no step. `spans`: keep the position of each
        piece of the step.
        """
        now = time.monotonic_ns()
        self.since = now
        self._began_to_wait = _NONE
        self.spent = [0] * len(PHASES)
        self._waited = [0] * len(PHASES)
        self._keeps = spans
        self.marks = [] if spans or self._event is not None else None
        if self.marks is not None:
            self.mark(now)

    def end(self, step: int, hidden: float | None = 0.0, *, spans: bool = False) -> None:
        """End a step and begin the next. `hidden`: seconds of communication during computation.
        `spans`: keep the spans of the next step.
        """
        self._count()
        marks = self.marks
        if self._event is None:
            pieces = () if marks is None else _spans(marks)
            self._finished.append(_times(step, self.spent, self._waited, hidden, pieces))
        elif marks is not None:
            self._open.append((step, marks, hidden, self._keeps))
        self.begin(spans=spans)

    def _count(self) -> None:
        """Add the time until now to the current phase."""
        now = time.monotonic_ns()
        self.spent[self.phase] += now - self.since
        self.since = now
        if self.marks is not None:
            self.mark(now)

    def paused(self) -> dict[str, float]:
        """Return the host's seconds of each kind of pause since the last step ended."""
        self._count()
        return {name: self.spent[INDEX[name]] / _SECOND for name in PAUSES}

    def finished(self) -> list[StepTimes]:
        """Return the steps that have ended since the last call, in order. On a GPU: those whose
        work is done.
        """
        while self._open:
            step, marks, hidden, keeps = self._open[0]
            if not marks[-1].event.query():
                break
            self._open.popleft()
            spent, waited = _of_device(marks)
            pieces = _spans(_on_device(marks)) if keeps else ()
            self._finished.append(_times(step, spent, waited, hidden, pieces))
        finished = self._finished
        self._finished = []
        return finished

    def mark(self, now: int) -> None:
        assert self.marks is not None
        if len(self.marks) == _MOST_MARKS:  # no step ends, so this is not a training any more
            self.marks = None
            return
        event = None
        if self._event is not None:
            event = self._event()
        self.marks.append(_Mark(self.phase, self._began_to_wait != _NONE, now, event))


def _of_device(marks: Sequence[_Mark]) -> tuple[list[int], list[int]]:
    """Return the ns spent, and the ns waited, in each phase between marks in a device's stream."""
    spent = [0] * len(PHASES)
    waited = [0] * len(PHASES)
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
    spans: list[PhaseSpan] = []
    for mark, following in itertools.pairwise(marks):
        span = PhaseSpan(PHASES[mark.phase], mark.waits, mark.ns / _SECOND, following.ns / _SECOND)
        if spans and spans[-1].phase == span.phase and spans[-1].waits == span.waits:
            span = span._replace(begin=spans.pop().begin)
        spans.append(span)
    return spans


def _times(
    step: int,
    spent: Sequence[int],
    waited: Sequence[int],
    hidden: float | None,
    spans: Sequence[PhaseSpan],
) -> StepTimes:
    own = [(ns - waiting) / _SECOND for ns, waiting in zip(spent, waited, strict=True)]
    waited_in_step = sum(waited) - waited[_EVALUATE] - waited[_CHECKPOINT]
    return StepTimes(
        step=step,
        data=own[_DATA],
        forward=own[_FORWARD],
        backward=own[_BACKWARD],
        moving=own[_REDUCE],
        waits=waited_in_step / _SECOND,
        optimizer=own[_OPTIMIZER],
        checks=own[_CHECKS],
        other=own[_LOOP] + own[_START],
        hidden=hidden,
        evaluate=spent[_EVALUATE] / _SECOND,
        checkpoint=spent[_CHECKPOINT] / _SECOND,
        spans=spans,
    )
