"""The interface of an update. An update applies the summed gradients to the parameters, and decides
which steps the ranks take in common. `Applied` says what it did in a step or a server's window.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.collectives.group import Group
from lockstep.gradients.facts import Facts, Reading
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.saved_state import KeepsState
from lockstep.updates.norm_and_clip import Norm
from lockstep.updates.optimizer_state import OptimizerState
from lockstep.world.world import World

NOTHING = "every rank's weight is 0: the window has no samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What an update works with. It stays the same for the life of the update."""

    world: World
    everyone: Group
    """All ranks of the training."""
    model: nn.Module
    reducer: Reducer
    optimizer: Optimizer
    scheduler: LRScheduler | None
    """Stepped after every applied update: by the Stepper, or by whatever else applies updates."""
    scaler: torch.amp.GradScaler | None
    clip: float | None
    norm: Norm


def may_draw(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step may draw random numbers: torch's own optimizers do not, unless
    hooks are registered.
    """
    return (
        not type(optimizer).__module__.startswith("torch.optim.")
        or bool(optimizer._optimizer_step_pre_hooks)
        or bool(optimizer._optimizer_step_post_hooks)
    )


class Applied:
    """What an update did. On a GPU the device knows it first: the host reads it, and waits, only
    when somebody looks.

    `norm` is the gradient's norm before clipping (None if nobody asked for it). `applied` is
    whether the optimizer stepped, `reason` why not. `scale` is the loss scale before and after the
    update.
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
        self._names: list[str] = []
        values: list[Tensor] = []
        if norm is not None:
            self._names.append("norm")
            values.append(norm.reshape(1).double())
        if skipped is not None:
            self._names.append("skipped")
            values.append(skipped.reshape(1).double())
        if scale is not None:
            self._names += ["scale", "scale after"]
            values += [value.reshape(1).double() for value in scale]
        self._values = torch.cat(values) if values else None
        self._reading: Reading | None = None
        if self._values is not None and self._values.is_cuda:
            self._reading = Reading(self._values)
        self._numbers: dict[str, float] | None = None

    def _read(self) -> dict[str, float]:
        if self._numbers is None:
            numbers: list[float] = []
            if self._reading is not None:
                numbers = self._reading.list()
            elif self._values is not None:
                numbers = self._values.tolist()
            self._numbers = dict(zip(self._names, numbers, strict=True))
        return self._numbers

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
        numbers = self._read()
        if numbers.get("scale after", math.inf) < numbers.get("scale", -math.inf):
            return (
                f"gradients overflowed at loss scale {numbers['scale']:g}; it is"
                f" {numbers['scale after']:g} now"
            )
        if numbers.get("skipped"):
            return f"the gradient's norm is {numbers['norm']}"
        return None

    def explain(self, reason: str) -> None:
        """Replace the reason why the optimizer did not step by one that says more."""
        self._known_reason = reason


@dataclass(frozen=True, slots=True)
class AppliedWindow:
    """One window that a server has applied, as rank 0 records it. Any rank may have computed any
    part of it.
    """

    step: int
    """The window's number, counted from 0 over all epochs."""
    epoch: int
    loss: float
    weight: float
    samples_by_rank: tuple[int, ...]
    age: float
    """The mean number of updates between the pull and the application of its gradients."""
    lr: float
    at: float
    """When it was applied (perf_counter)."""
    reason: str
    """Why the optimizer did not step; "" if it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWindow:
    """How a window ended."""

    steps: int
    """The steps that the training has taken since it began, as far as this rank knows."""
    number: int
    """The number of this rank's window, counted from the step at which this rank began."""
    loss: float
    """The sum of the losses."""
    weight: float
    stop: bool
    """Whether any rank is known to ask to stop."""
    outcome: Applied | None = None
    """None if others apply the gradients later."""
    synchronized: bool = True
    """Whether all ranks hold the same model now."""
    windows: tuple[AppliedWindow, ...] = ()
    """At a server, on rank 0: the windows applied since this rank's last step."""


class Update(KeepsState, ABC):
    """Applies the gradients of one reducer with one optimizer. What it `kept` is without the
    optimizer's state.
    """

    name: str
    optimizer: OptimizerState
    follows = True
    """Whether the update depends on the layout of the reducer's parameters: call `follow`."""

    def follow(self) -> None:
        """Before each window: follow a new layout of the reducer's parameters, which may be other
        parameters. Every rank calls it.
        """
        return

    @abstractmethod
    def end(self, steps: int, facts: Facts, divisor: float) -> EndedWindow:
        """End a window whose sums are complete: apply them, and synchronize if it is time. Every
        rank calls it.

        Args:
            steps: the steps that were taken before this window.
            facts: those of this window.
            divisor: what the sums are still to be divided by.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a whole optimizer's state. Every rank calls it with the same state."""
        self.optimizer.load_state_dict(state)

    @property
    def synchronized(self) -> bool:
        """Whether all ranks hold the same model. The same on all ranks."""
        return True

    def replicated(self) -> Sequence[tuple[str, Tensor]]:
        """The update's own state, by name, that is equal on all ranks whenever `synchronized` is
        true.
        """
        return ()

    def overwritten(self) -> Sequence[Tensor]:
        """The parameters, or parts, that every step overwrites with other ranks' results."""
        return ()
