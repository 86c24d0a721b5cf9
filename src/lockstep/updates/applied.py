"""What an update did: whether the optimizer stepped, the gradient's norm, and why not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.gradients.reading import Reading


class Applied:
    """What an update did. On a GPU the device knows it first: it is read, and waited for, where somebody looks.

    `norm` is the gradient's before clipping (None where nobody asked for it), `applied` whether the optimizer stepped, `reason` why not.
    `scale` is the loss scale before the update, and after it.
    """

    def __init__(
        self,
        norm: Tensor | None = None,
        *,
        skipped: Tensor | None = None,
        scale: tuple[Tensor, Tensor] | None = None,
        reason: str | None = None,
    ) -> None:
        self._known_reason = reason
        self._names = [name for name, value in (("norm", norm), ("skipped", skipped), ("scale", scale)) if value is not None]
        values = [value.reshape(1).double() for value in (norm, skipped, *(scale or ())) if value is not None]
        self._reading = Reading(torch.cat(values)) if values else None
        self._found: dict[str, float] | None = None

    def _read(self) -> dict[str, float]:
        if self._found is None:
            names = [*self._names, "scale after"] if "scale" in self._names else self._names
            self._found = dict(zip(names, self._reading.list() if self._reading else [], strict=True))
        return self._found

    @property
    def norm(self) -> float | None:
        return self._read().get("norm")

    @property
    def applied(self) -> bool:
        return self.reason is None

    @property
    def reason(self) -> str | None:
        if self._known_reason is not None:
            return self._known_reason
        found = self._read()
        if found.get("scale after", math.inf) < found.get("scale", -math.inf):
            return f"gradients overflowed at loss scale {found['scale']:g}; it is {found['scale after']:g} now"
        if found.get("skipped"):
            return f"the gradient's norm is {found['norm']}"
        return None

    def explain(self, reason: str) -> None:
        """Say more about why the optimizer did not step."""
        self._known_reason = reason
