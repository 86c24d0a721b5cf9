"""Divide the summed gradients, check that they are finite, clip once, step: what every update
does to the part that it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.updates.applied import Applied
from lockstep.updates.norm import Summed
from lockstep.updates.update import Updated


class Stepping:
    """Steps the optimizer of `updated` on `summed` gradients."""

    def __init__(self, updated: Updated, summed: Summed) -> None:
        self._optimizer, self._clip, self._scaler = updated.optimizer, updated.clip, updated.scaler
        self._summed, self._norm = summed, updated.norm

    def apply(self, divisor: float) -> Applied:
        clip, scaler = self._clip, self._scaler
        if scaler is not None and scaler.is_enabled():
            return self._apply_scaled(divisor, clip, scaler)
        if clip is None:
            return self._apply(divisor, None)
        norm = self._norm(self._summed, divisor)
        skipped = ~norm.isfinite()
        return self._apply(divisor / _shrink(norm, clip), norm, skipped)

    def _apply(
        self, divisor: float | Tensor, norm: Tensor | None, skipped: Tensor | None = None
    ) -> Applied:
        if skipped is None and isinstance(divisor, float) and divisor == 1:
            self._optimizer.step()
        elif getattr(self._optimizer, "_step_supports_amp_scaling", False):
            self._step_dividing(divisor, skipped)
        elif skipped is None or not bool(skipped):
            # an optimizer that cannot be told on the device has the host wait for the gradient
            self._multiply(1 / divisor)
            self._optimizer.step()
        return Applied(norm, skipped=skipped)

    def _step_dividing(self, divisor: float | Tensor, skipped: Tensor | None) -> None:
        """Step a fused optimizer, which divides gradients by a loss scale as it reads them (and
        leaves them divided): one pass fewer.

        It does nothing where `skipped` is true.
        """
        optimizer: Any = self._optimizer
        # torch.full and not torch.tensor: no copy from the host.
        scale = (
            divisor
            if isinstance(divisor, Tensor)
            else torch.full((), divisor, device=self._summed.device, dtype=torch.float32)
        )
        optimizer.grad_scale = scale.to(torch.float32)
        optimizer.found_inf = (
            torch.zeros((), device=self._summed.device, dtype=torch.float32)
            if skipped is None
            else skipped.to(torch.float32)
        )
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _apply_scaled(
        self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler
    ) -> Applied:
        """With a loss scaler the gradients are divided before it looks at them; it finds what is
        not finite, and lowers its scale.
        """
        one = torch.ones((), device=self._summed.device)
        before, norm = scaler.scale(one), None
        if clip is None:
            self._multiply(1 / divisor)
        else:
            norm = self._norm(self._summed, divisor) / before.double()
            # The scaler looks at elements; a norm that overflows where no element does has to reach
            # them.
            self._multiply(torch.where(norm.isfinite(), _shrink(norm, clip), torch.nan) / divisor)
        scaler.unscale_(self._optimizer)
        scaler.step(self._optimizer)
        scaler.update()
        return Applied(norm, scale=(before, scaler.scale(one)))

    def _multiply(self, factor: float | Tensor) -> None:
        if isinstance(factor, Tensor) or factor != 1:
            for each in self._summed.flats():
                each.mul_(factor)


def _shrink(norm: Tensor, clip: float) -> Tensor:
    """The factor that bounds a gradient of that norm by `clip`, as torch's clip_grad_norm_ does."""
    return (clip / (norm + 1e-6)).clamp(max=1.0)
