"""What one optimizer step came to."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.step_clock import StepTimes
from lockstep.updates.applied import Applied
from lockstep.updates.server.applied_window import AppliedWindow


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step, the same on all ranks.

    `loss` is the sum of losses over the sum of weights, of the whole global batch, before the update (nan where all weights are 0);
    `stop` that some rank asked to stop; `samples_by_rank` what each rank really walked (zeros for plain lists of batches); `together`
    that all ranks hold the same model now. Where ranks step alone, `loss`, `weight` and the seconds are this rank's own, and `stop` is heard at meetings;
    at a server a meeting tells those of the window that was applied last.
    On a GPU, `norm`, `applied` and `reason` wait for the gradient: look at them when you need them.
    """

    loss: float
    weight: float
    stop: bool
    samples_by_rank: tuple[int, ...]
    bytes_sent: int
    outcome: Applied
    together: bool = True
    gradient_age: float | None = None
    """At a server: the updates that have come since this rank pulled the parameters of its gradient, until it pushed it."""
    windows: tuple[AppliedWindow, ...] = ()
    """At a server, on rank 0: the windows that were applied since the last step of this rank."""
    times: tuple[StepTimes, ...] = ()
    """Where this rank's time went: in this step, or, on a GPU, in those whose work the device has come through since."""
    busy_by_rank: tuple[float, ...] = ()
    """Seconds that each rank computed forward and backward, in the latest step before this one that it knows of."""
    waited_by_rank: tuple[float, ...] = ()
    """Seconds that each rank waited for others or the network in that step: the one with the least came last."""

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
