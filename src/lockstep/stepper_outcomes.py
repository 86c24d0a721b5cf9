"""How a Stepper's steps ended: the scheduler follows those that were applied, and a skipped one is said, with where its nan came from.

On a CPU that is known at once. On a GPU it is looked up when the next window opens, or replicas meet, so that no step waits for the device;
unless a scheduler has to know. A server's windows are applied by others: of them it is only said which were skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checks.nonfinite import NonFiniteTrace
from lockstep.errors import LockstepWarning
from lockstep.gradients.facts import Facts
from lockstep.updates.applied import Applied
from lockstep.updates.server.applied_window import AppliedWindow
from lockstep.world import World


class Outcomes:
    """`trace` looks at the gradients of the window after a skipped one; it belongs to a reducer, and is given anew with one."""

    trace: NonFiniteTrace

    def __init__(self, world: World, scheduler: LRScheduler | None, scaler: GradScaler | None) -> None:
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
        if reason is None or (alone and facts.weight == 0):  # alone, a rank without micro-batches keeps to the others' learning rate
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
        """That a step was skipped: once for each kind of reason. A warning of the step that is just over names the line that called the Stepper."""
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(f"step {step} was skipped: {reason}. This is said once.", LockstepWarning, stacklevel=4)
