"""What one optimizer step came to, how its end is seen, and where its time went."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checks.nonfinite import NonFiniteTrace
from lockstep.config.documented import documented
from lockstep.errors import LockstepWarning
from lockstep.gradients.facts import Facts, FactsMessage
from lockstep.runtime import status
from lockstep.runtime.step_clock import StepClock, StepTimes
from lockstep.updates.update import Applied, AppliedWindow
from lockstep.world.world import World


@documented
@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, as `Stepper.step` returns it: the same on all ranks.

    With local steps or a server, `loss`, `weight` and the seconds are those of this rank, and `stop`
    is known only when the replicas synchronize. A server's synchronization returns the values of the
    window that was applied last. On a GPU, `norm`, `applied` and `reason` wait for the gradient:
    read them when you need them.
    """

    loss: float
    """The sum of losses over the sum of weights, of the whole global batch, before the update;
    nan where all weights are 0.
    """
    weight: float
    """The sum of weights of the whole global batch."""
    stop: bool
    """Whether a rank asked to stop."""
    samples_by_rank: tuple[int, ...]
    """The samples that each rank walked; zeros for plain lists of batches."""
    bytes_sent: int
    """Bytes that this rank has sent since the world was opened, not in this step alone: subtract
    the value of the step before.
    """
    outcome: Applied
    """What `norm`, `applied` and `reason` are read from."""
    together: bool = True
    """Whether all ranks hold the same model now."""
    gradient_age: float | None = None
    """At a server: the number of updates between this rank's pull of the parameters and its push
    of their gradient.
    """
    windows: tuple[AppliedWindow, ...] = ()
    """At a server, on rank 0: the windows that were applied since the last step of this rank."""
    times: tuple[StepTimes, ...] = ()
    """Seconds of each phase of this rank's step. On a GPU: of the steps that the device has
    finished since.
    """
    busy_by_rank: tuple[float, ...] = ()
    """Seconds that each rank computed forward and backward, in the latest step before this one
    that it knows of.
    """
    waited_by_rank: tuple[float, ...] = ()
    """Seconds that each rank waited for others or the network in that step. The rank with the
    least came last.
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
        """Why it did not step."""
        return self.outcome.reason


class Outcomes:
    """How a Stepper's steps ended: the scheduler follows those that were applied, and a skipped one
    is said, with where its nan came from.

    On a CPU that is known at once. On a GPU it is looked up when the next window opens, or replicas
    meet, so that no step waits for the device; unless a scheduler has to know. A server's windows
    are applied by others: of them it is only said which were skipped. `trace` looks at the
    gradients of the window after a skipped one; it belongs to a reducer, and is given anew with
    one.
    """

    trace: NonFiniteTrace

    def __init__(
        self, world: World, scheduler: LRScheduler | None, scaler: GradScaler | None
    ) -> None:
        self._world, self._scheduler, self._scaler = world, scheduler, scaler
        self.known_at_once = world.device.type == "cpu" or scheduler is not None
        """Whether to settle a step as soon as it is noted."""
        self._open: tuple[int, Applied, Facts, bool] | None = None
        self._said: set[str] = set()
        self.applied = 0
        """Steps whose update was applied; at a server, those that this rank has heard of."""

    def note(self, step: int, outcome: Applied, facts: Facts, *, alone: bool) -> None:
        """Step number `step` has ended. `alone`: these are the facts of this rank only."""
        self._open = step, outcome, facts, alone

    def settle(self) -> None:
        """See how the noted step ended. Every rank that has noted it calls this alike."""
        if self._open is None:
            return
        (step, outcome, facts, alone), self._open = self._open, None
        reason = outcome.reason
        self.applied += reason is None
        if reason is None or (alone and facts.weight == 0):
            # alone, a rank without micro-batches keeps to the others' learning rate
            if self._scheduler is not None:
                self._scheduler.step()
            return
        if self._scaler is not None and facts.weight:
            return  # with a loss scale, overflows belong to the training
        kind = reason.partition(":")[0]
        if facts.weight:
            kind += " (traced)" if self.trace.watched else ""
            outcome.explain(f"{reason}. {self.trace.tell(facts.losses_by_rank)}")
            self.trace.watch()
        if self._world.rank == 0:
            self.say(kind, step, outcome.reason or reason)

    def skipped(self, windows: Sequence[AppliedWindow]) -> None:
        """Say which of these windows, that a server has come through, were not applied."""
        for each in windows:
            self.applied += not each.reason
            if each.reason:
                self.say(each.reason, each.step + 1, each.reason)

    def say(self, kind: str, step: int, reason: str) -> None:
        """That a step was skipped: once for each kind of reason. A warning of the step that is
        just over names the line that called the Stepper.
        """
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(
                f"step {step} was skipped: {reason}. This warning appears once.",
                LockstepWarning,
                stacklevel=4,
            )


class StepperClock:
    """Times the steps, and keeps of the latest one that is known what the others are told in the
    next step's facts.

    `per_micro_batch`: seconds that one took on this rank, loading included; 0 where it walked none.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None  # in which the model computes
        self._device = device
        self.running = StepClock(self._mark if device.type == "cuda" else None)
        self.keeps_spans: Callable[[int], bool] = lambda step: False
        """Of which steps, by number, it shall be kept when each piece of them began and ended."""
        self.per_micro_batch = 0.0
        self._latest: StepTimes | None = None
        # micro-batches of the steps whose times are not known yet
        self._walked: dict[int, int] = {}

    def open(self) -> None:
        """A window begins: from now on phases are this training's."""
        self._stream = (
            torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        )
        status.open_clock(self.running)

    def _mark(self) -> torch.cuda.Event:
        """In the model's stream, whichever is the current one: that something waits in another
        one does not hold the model up.
        """
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def tell(self, facts: FactsMessage) -> None:
        if self._latest is not None:
            facts.add_times(self._latest.busy, self._latest.waits, self.per_micro_batch)

    def end(self, step: int, micro_batches: int, hidden: float | None) -> tuple[StepTimes, ...]:
        """Step `step` has ended, which walked so many; gives the steps whose times are known
        since. `hidden`: as in `StepTimes`.
        """
        self.running.end(step, hidden, spans=self.keeps_spans(step + 1))
        self._walked[step] = micro_batches
        found = tuple(self.running.finished())
        for times in found:
            walked = self._walked[times.step]
            self._latest = times
            self.per_micro_batch = (times.data + times.busy) / walked if walked else 0.0
        if found:
            self._walked = {
                number: count for number, count in self._walked.items() if number > found[-1].step
            }
        return found


def allow_scheduler(optimizer: Optimizer) -> None:
    """Tell torch that a scheduler which steps now is not too early: the step was another rank's,
    or before a checkpoint.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
