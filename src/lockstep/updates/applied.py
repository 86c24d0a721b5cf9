"""What an update did: of a step, of a window at a server, and how a window ended for the
Stepper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.gradients.facts import Reading


class Applied:
    """What an update did. On a GPU the device knows it first: it is read, and waited for, where
    somebody looks.

    `norm` is the gradient's before clipping (None where nobody asked for it), `applied` whether the
    optimizer stepped, `reason` why not. `scale` is the loss scale before the update, and after it.
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
        self._names = [
            name
            for name, value in (("norm", norm), ("skipped", skipped), ("scale", scale))
            if value is not None
        ]
        values = [
            value.reshape(1).double()
            for value in (norm, skipped, *(scale or ()))
            if value is not None
        ]
        self._reading = Reading(torch.cat(values)) if values else None
        self._found: dict[str, float] | None = None

    def _read(self) -> dict[str, float]:
        if self._found is None:
            names = [*self._names, "scale after"] if "scale" in self._names else self._names
            self._found = dict(
                zip(names, self._reading.list() if self._reading else [], strict=True)
            )
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
            return (
                f"gradients overflowed at loss scale {found['scale']:g}; it is"
                f" {found['scale after']:g} now"
            )
        if found.get("skipped"):
            return f"the gradient's norm is {found['norm']}"
        return None

    def explain(self, reason: str) -> None:
        """Say more about why the optimizer did not step."""
        self._known_reason = reason


@dataclass(frozen=True, slots=True)
class AppliedWindow:
    """One window that a server has applied, of which any rank may have computed any part: what
    rank 0 records of it.
    """

    step: int
    """Its number, counted from 0 over all epochs."""
    epoch: int
    loss: float
    weight: float
    samples_by_rank: tuple[int, ...]
    age: float
    """Updates that came between the pull and the application of its gradients, on average."""
    lr: float
    at: float
    """When (perf_counter)."""
    reason: str
    """Why the optimizer did not step; "" where it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWindow:
    """How a window ended."""

    steps: int
    """That the training has taken since it began, as far as this rank knows."""
    number: int
    """Of this rank's window, counted on from the step at which it began."""
    loss: float
    """The sum of the losses."""
    weight: float
    stop: bool
    """Whether some rank was heard to ask to stop."""
    outcome: Applied | None = None
    """None where others apply the gradients, in their time."""
    everyone: Group | None = None
    """The ranks of the training from now on; None: as before."""
    gradient_age: float | None = None
    """At a server: the updates that have come since the parameters of this gradient were pulled."""
    windows: tuple[AppliedWindow, ...] = ()
    """At a server, on rank 0: those that were applied since the last step of this rank."""
