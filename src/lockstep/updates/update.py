"""What an update is: who applies the summed gradients to the parameters, and how; and which
steps the ranks make in common.
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

from lockstep.collectives.group import Group
from lockstep.data.draws import Draws
from lockstep.gradients.facts import Facts
from lockstep.gradients.reducer import Reducer
from lockstep.runtime import status
from lockstep.updates.applied import Applied, EndedWindow
from lockstep.updates.norm import Norm
from lockstep.updates.optimizer_state import OptimizerState
from lockstep.world.world import World

NOTHING = "every rank's weight is 0: the window holds nothing to learn from"


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
        """Flat memory of parameters that every step overwrites with other ranks' results."""
        return ()

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


class OwnStep(Update):
    """An update whose optimizer steps on every rank, at the end of every window."""

    def __init__(self, updated: Updated) -> None:
        self._updated = updated

    def end(self, steps: int, facts: Facts, divisor: float) -> EndedWindow:
        status.enter("optimizer")
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

    @abstractmethod
    def apply(self, divisor: float) -> Applied:
        """Divide the sums, check that they are finite, clip once, step the optimizer. On a GPU
        the host waits for nothing that it need not know.
        """
