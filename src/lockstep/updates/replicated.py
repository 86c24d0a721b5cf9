"""Every rank applies the whole update to its whole copy: the form of data parallelism that everybody knows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.updates.norm import gradient_norm
from lockstep.updates.update import Applied


class Replicated:
    """The gradients are equal on all ranks, so norm, finite check and step need no further message."""

    name = "replicated"

    def bind(self, reducer: Reducer, optimizer: Optimizer) -> None:
        known = {id(parameter) for parameter in reducer.parameters}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in known:
                    raise UsageError(
                        f"the optimizer's parameter group {number} holds a parameter of shape {list(parameter.shape)} that the model does not have: "
                        "build the optimizer from this model's parameters (without ignored ones), after moving or replacing them"
                    )
        self._reducer = reducer
        self._optimizer = optimizer

    def apply(self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler | None) -> Applied:
        if scaler is not None and scaler.is_enabled():
            return self._apply_scaled(divisor, clip, scaler)
        norm = None
        if clip is not None:
            norm = gradient_norm(self._reducer.buckets) / divisor
            if not math.isfinite(norm):
                return Applied(norm, False, f"the gradient's norm is {norm}")
            divisor /= min(1.0, clip / (norm + 1e-6))
        if getattr(self._optimizer, "_step_supports_amp_scaling", False):
            self._step_dividing(divisor)
        else:
            self._multiply(1 / divisor)
            self._optimizer.step()
        return Applied(norm, True)

    def _step_dividing(self, divisor: float) -> None:
        """Step a fused optimizer, which divides gradients by a loss scale as it reads them (and leaves them divided): one pass fewer."""
        device = self._reducer.buckets[0].sum.device
        optimizer: Any = self._optimizer
        optimizer.grad_scale = torch.full((), divisor, device=device, dtype=torch.float32)
        optimizer.found_inf = torch.zeros((), device=device, dtype=torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _apply_scaled(self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler) -> Applied:
        self._multiply(1 / divisor)
        scaler.unscale_(self._optimizer)
        norm = None
        if clip is not None:
            norm = gradient_norm(self._reducer.buckets)
            if math.isfinite(norm):
                self._multiply(min(1.0, clip / (norm + 1e-6)))
            elif all(bucket.sum.isfinite().all() for bucket in self._reducer.buckets):
                scaler.update()
                return Applied(norm, False, f"the gradient's norm is {norm}")
        before = scaler.get_scale()
        scaler.step(self._optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            return Applied(norm, False, f"gradients overflowed at loss scale {before:g}; it is {scaler.get_scale():g} now")
        return Applied(norm, True)

    def _multiply(self, factor: float) -> None:
        if factor != 1:
            for bucket in self._reducer.buckets:
                bucket.sum.mul_(factor)
