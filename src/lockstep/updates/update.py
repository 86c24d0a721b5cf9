"""What an update is: who applies the summed gradients to the parameters, and how; which steps the
ranks make in common; and what it did (`Applied`), of a step or of a window at a server.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checks.witness import Witness
from lockstep.collectives.group import Group
from lockstep.data.epoch import Draws
from lockstep.gradients.facts import Facts, Reading
from lockstep.gradients.reducer import Reducer
from lockstep.updates.norm import Norm
from lockstep.updates.optimizer_state import OptimizerState
from lockstep.world.world import World

NOTHING = "every rank's weight is 0: the window has no samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What an update works on, and with: it is the same for as long as the update lives."""

    world: World
    everyone: Group
    """All ranks of the training."""
    model: nn.Module
    reducer: Reducer
    optimizer: Optimizer
    scheduler: LRScheduler | None
    """Stepped after every applied update; by the Stepper, but where others apply."""
    scaler: torch.amp.GradScaler | None
    clip: float | None
    norm: Norm
    wants_stop: Callable[[], bool]
    """Whether this rank asks to stop."""


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


class Update(ABC):
    """One per reducer and optimizer.

    What is written out here is so where all ranks make every step in common; an update whose ranks
    part between meetings says otherwise.
    """

    name: str
    optimizer: OptimizerState

    @abstractmethod
    def follow(self) -> None:
        """Before each window: the reducer may have laid its parameters, the same or others, in
        another way. Every rank calls it.
        """

    @abstractmethod
    def end(self, steps: int, facts: Facts, divisor: float) -> EndedWindow:
        """The sums are complete, `steps` after the training's begin, and still to be divided by
        `divisor`.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a whole optimizer's state. Every rank calls it with the same."""
        self.optimizer.load_state_dict(state)

    @property
    def together(self) -> bool:
        """Whether all ranks hold the same model. The same on all ranks."""
        return True

    @property
    def dealer(self) -> Draws | None:
        """Who deals out the slots of a step, where they are no fixed share of each rank."""
        return None

    @property
    def between_meetings(self) -> bool:
        """Whether this rank's model is no state of the training that could be kept."""
        return False

    def replicated(self) -> Sequence[tuple[str, Tensor]]:
        """What it keeps beside the model that is equal on all ranks where these are together, by
        name.
        """
        return ()

    def overwritten(self) -> Sequence[Tensor]:
        """Of the parameters, what every step overwrites with other ranks' results."""
        return ()

    def repeat(self, witness: Witness) -> None:
        """In the next update: have another rank repeat what only one rank does."""
        return

    def begin(self, window: object, steps: int) -> None:
        """Before the first forward of a window, `steps` after the training's begin."""
        return

    def meet_if_due(self, ended: EndedWindow) -> bool:
        """The step is counted: meet, where it is time. Every rank calls it; whether some rank
        was heard to ask to stop.
        """
        return ended.stop

    def meet(self, *, stop: bool = False) -> bool:
        """Have replicas that have parted meet now. Every rank calls it; whether some rank was
        heard to ask to stop.
        """
        return False

    def meet_before(self, step: int) -> None:
        """Have ranks of which each goes its own way meet when `step` steps were taken. Every
        rank calls it alike.
        """
        return

    def model(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Of this rank's `weights`: the model that all ranks agree on."""
        return weights

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """What checkpoints keep of it beside the optimizer's state (checkpoints/pieces.py,
        Keeps).
        """
        return {}, {}

    def take_back(
        self, common: Mapping[str, Tensor], by_rank: Sequence[Mapping[str, Tensor]]
    ) -> None:
        return
