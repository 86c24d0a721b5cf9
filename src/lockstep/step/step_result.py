"""The result of one optimizer step, whether its update was applied, and its times."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checks.nonfinite import NonFiniteTrace
from lockstep.config.documented import documented
from lockstep.errors import LockstepWarning
from lockstep.gradients.facts import Facts
from lockstep.runtime import status
from lockstep.runtime.step_clock import StepClock, StepTimes
from lockstep.updates.update import Applied, AppliedWindow
from lockstep.world.world import World


@documented
@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, as `Stepper.step` returns it: the same on all ranks.

    With local steps or a server, `loss`, `weight` and the seconds are those of this rank, and
    `stop` is known only when the replicas synchronize. A server's synchronization returns the
    values of the window that was applied last. On a GPU, reading `norm`, `applied` or `reason`
    waits for the gradient: read them only when you need them.
    """

    loss: float
    """The sum of losses over the sum of weights, of the whole global batch, before the update;
    nan where all weights are 0.
    """
    weight: float
    """The sum of weights of the whole global batch."""
    step: int
    """The number of the step, from 1, over all processes of the training: a resumed one counts on."""
    stop: bool
    """Whether a rank asked to stop."""
    samples_by_rank: tuple[int, ...]
    """The number of samples that each rank computed; zeros for plain lists of batches."""
    bytes_sent: int
    """Bytes that this rank has sent since the world was opened, not in this step alone: subtract
    the value of the step before.
    """
    outcome: Applied
    """The object from which `norm`, `applied` and `reason` are read."""
    synchronized: bool = True
    """Whether all ranks hold the same model now."""
    windows: tuple[AppliedWindow, ...] = ()
    """With a server, on rank 0: the windows that were applied since the last step of this rank."""
    times: tuple[StepTimes, ...] = ()
    """Seconds of each phase of this rank's step. On a GPU: of the steps that the device has
    finished since the last call.
    """
    busy_by_rank: tuple[float, ...] = ()
    """Seconds that each rank computed forward and backward, in the latest earlier step whose times
    that rank knows.
    """
    waited_by_rank: tuple[float, ...] = ()
    """Seconds that each rank waited for others or the network, in the same step as `busy_by_rank`.
    The rank with the smallest value came last.
    """

    @property
    def norm(self) -> float | None:
        """The gradient's norm before clipping; None without `clip`."""
        return self.outcome.norm

    @property
    def applied(self) -> bool:
        """Whether the optimizer stepped."""
        return self.outcome.applied

    @property
    def reason(self) -> str | None:
        """Why the optimizer did not step; None if it did."""
        return self.outcome.reason


class Outcomes:
    """Steps the scheduler after every applied update, and warns of a skipped one with the origin of
    its nan.

    On a CPU the outcome of a step is known immediately. On a GPU it is read when the next window
    opens or the replicas synchronize, so that no step waits for the device; with a scheduler it is
    read immediately. With a server other ranks apply the windows; this class only counts them and
    warns of skipped ones. `trace` inspects the gradients of the window after a skipped one; the
    Stepper sets a new `trace` for each new reducer.
    """

    trace: NonFiniteTrace

    def __init__(
        self, world: World, scheduler: LRScheduler | None, scaler: GradScaler | None
    ) -> None:
        self._world = world
        self._scheduler = scheduler
        self._scaler = scaler
        self.known_at_once = world.device.type == "cpu" or scheduler is not None
        """Whether to call `settle` for a step as soon as it is in `ended`."""
        self.ended: tuple[int, Applied, Facts, bool] | None = None
        """A step that is not settled: its number, what the update did, its facts, and whether these
        are of this rank only.
        """
        self._warned: set[str] = set()
        self.applied = 0
        """Number of steps whose update was applied; with a server, those reported to this rank."""

    def settle(self) -> None:
        """Find out whether the step in `ended` was applied, and step the scheduler or warn. All
        ranks call it.
        """
        if self.ended is None:
            return
        step, outcome, facts, alone = self.ended
        self.ended = None
        reason = outcome.reason
        self.applied += reason is None
        if self._scheduler is not None and (reason is None or alone):
            # ranks that step alone have one learning rate, also where one has nothing to apply
            self._scheduler.step()
        if reason is None or (alone and facts.weight == 0):
            return
        if self._scaler is not None and facts.weight:
            return  # with a loss scale, overflows are expected
        kind = reason.partition(":")[0]
        if facts.weight:
            if self.trace.watched:
                kind += " (traced)"
            outcome.explain(f"{reason}. {self.trace.tell(facts.losses_by_rank)}")
            self.trace.watch()
        if self._world.rank == 0:
            self._warn(kind, step, outcome.reason or reason)

    def skipped(self, windows: Sequence[AppliedWindow]) -> None:
        """Count the applied windows among those that a server has processed, and warn of the
        others.
        """
        for window in windows:
            if window.reason:
                self._warn(window.reason, window.step + 1, window.reason)
            else:
                self.applied += 1

    def _warn(self, kind: str, step: int, reason: str) -> None:
        """Warn that a step was skipped, once for each kind of reason. The stacklevel is right for
        a step that has just ended: the warning names the line that called the Stepper.
        """
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"step {step} was skipped: {reason}. This warning appears once.",
                LockstepWarning,
                stacklevel=4,
            )


class StepperClock:
    """Times the steps. The times of the latest finished step are sent to the other ranks in the
    facts of the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None  # the stream in which the model computes
        self._device = device
        self.running = StepClock(self._mark if device.type == "cuda" else None)
        self.keeps_spans: Callable[[int], bool] | None = None
        """Whether to record spans (begin and end of every phase) for a step, by its number."""
        self.latest: StepTimes | None = None
        """The times of the latest step that has finished."""
        self._listeners: list[Callable[[Sequence[StepTimes]], None]] = []

    def open(self) -> None:
        """Make this the active clock: from now on it counts the phases. Called for every window."""
        self._stream = (
            torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        )
        status.open_clock(self.running)

    def _mark(self) -> torch.cuda.Event:
        """Record an event in the model's stream, even if another stream is current: waits in
        another stream do not delay the model.
        """
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def end(self, step: int, hidden: float | None) -> tuple[StepTimes, ...]:
        """End step `step`, and return the steps whose times have become known. `hidden`: as in
        `StepTimes`.
        """
        spans = self.keeps_spans is not None and self.keeps_spans(step + 1)
        self.running.end(step, hidden, spans=spans or bool(self._listeners))
        finished = tuple(self.running.finished())
        if finished:
            self.latest = finished[-1]
        for listener in self._listeners:
            listener(finished)
        return finished

    @contextmanager
    def listening(self, listener: Callable[[Sequence[StepTimes]], None]) -> Iterator[None]:
        """Call `listener` with the steps whose times have become known, at the end of each step in
        the block. Their spans are kept.
        """
        self._listeners.append(listener)
        self.restart()
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def restart(self) -> None:
        """Begin the next step now: the time since the last one belongs to no step."""
        self.open()
        self.running.begin(spans=bool(self._listeners))


def allow_scheduler(optimizer: Optimizer) -> None:
    """Suppress torch's warning of a scheduler that steps before the optimizer: the optimizer
    stepped on another rank, or before a checkpoint.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
