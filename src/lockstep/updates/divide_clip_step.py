"""Divide the summed gradients by the step's weight, check that they are finite, clip once, step.

The division is here, unless it was cheaper before: shared memory divides a sum while it is in the
cache (collectives/shared_memory/resident.py), and the drop-in wrapper multiplies each gradient as it
goes to its bucket (`Reducer.scale`). A fused optimizer divides as it reads. Loss scaling multiplies
the loss by a power of two (step/loss_scale.py), which is divided out here with the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.gradients.facts import Facts
from lockstep.updates.norm_and_clip import InBuckets, clip_factor
from lockstep.updates.update import NOTHING, Applied, EndedWindow, Update, Updated


class OwnStep(Update):
    """Steps the optimizer of `updated` on `summed` gradients."""

    def __init__(self, updated: Updated, summed: InBuckets) -> None:
        self._updated = updated
        self._summed = summed

    def end(self, steps: int, facts: Facts, divisor: float) -> EndedWindow:
        if facts.weight == 0:
            outcome = Applied(reason=NOTHING)
        elif not math.isfinite(facts.loss) and self._updated.scaler is None:
            outcome = Applied(
                reason=f"the loss is {facts.loss}: this update would make every weight nan"
            )
        else:
            outcome = self.apply(divisor)
        return EndedWindow(
            steps=steps + 1,
            number=steps + 1,
            loss=facts.loss,
            weight=facts.weight,
            stop=facts.stop > 0,
            outcome=outcome,
        )

    def apply(self, divisor: float) -> Applied:
        """Divide the sums, check that they are finite, clip once, step the optimizer. On a GPU the
        host waits only for values that it needs.
        """
        clip = self._updated.clip
        scaler = self._updated.scaler
        if scaler is not None and scaler.is_enabled():
            return self._apply_scaled(divisor, clip, scaler)
        optimizer = self._updated.optimizer
        flats = self._summed.flats
        if clip is None:
            self._take_step(optimizer, flats, divisor, None)
            return Applied()
        norm = self._updated.norm(self._summed, divisor)
        skipped = ~norm.isfinite()
        self._take_step(optimizer, flats, divisor / clip_factor(norm, clip), skipped)
        return Applied(norm, skipped=skipped)

    def _take_step(
        self,
        optimizer: Optimizer,
        flats: Callable[[], Sequence[Tensor]],
        divisor: float | Tensor,
        skipped: Tensor | None,
    ) -> None:
        """Step an optimizer on the gradients in `flats()`."""
        if skipped is None and isinstance(divisor, float) and divisor == 1:
            optimizer.step()
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            self._step_dividing(optimizer, divisor, skipped)
        elif skipped is None or not bool(skipped):
            # the host waits for the gradient, as it cannot tell this optimizer on the device
            _multiply(flats(), 1 / divisor)
            optimizer.step()

    def _step_dividing(
        self, optimizer: Any, divisor: float | Tensor, skipped: Tensor | None
    ) -> None:
        """Step a fused optimizer. It divides gradients by a loss scale as it reads them (and leaves
        them divided), which saves a pass over them.

        The step does nothing if `skipped` is true.
        """
        # torch.full, unlike torch.tensor, copies nothing from the host.
        device = self._summed.device
        if not isinstance(divisor, Tensor):
            divisor = torch.full((), divisor, device=device, dtype=torch.float32)
        if skipped is None:
            skipped = torch.zeros((), device=device, dtype=torch.float32)
        optimizer.grad_scale = divisor.to(torch.float32)
        optimizer.found_inf = skipped.to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _apply_scaled(
        self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler
    ) -> Applied:
        """Apply with a loss scaler. The gradients are divided before the scaler looks at them; it
        finds those that are not finite, and lowers its scale.
        """
        one = torch.ones((), device=self._summed.device)
        before = scaler.scale(one)
        norm = None
        if clip is None:
            _multiply(self._summed.flats(), 1 / divisor)
        else:
            norm = self._updated.norm(self._summed, divisor) / before.double()
            # The scaler checks elements. A norm that overflows while no element does must become
            # visible in them, so the factor is nan. Between gradients a flat tensor has zeros, which
            # must stay: nan there would be in the norm of every later step.
            factor = torch.where(norm.isfinite(), clip_factor(norm, clip), torch.nan) / divisor
            _multiply([gradient for _, gradient in self._summed.named()], factor)
        scaler.unscale_(self._updated.optimizer)
        scaler.step(self._updated.optimizer)
        scaler.update()
        return Applied(norm, scale=(before, scaler.scale(one)))


def _multiply(flats: Sequence[Tensor], factor: float | Tensor) -> None:
    if isinstance(factor, Tensor) or factor != 1:
        for flat in flats:
            flat.mul_(factor)
