"""What an update is: who applies the summed gradients to the parameters, and how; and which steps the ranks make in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep import status
from lockstep.checkpoints.pieces import Piece
from lockstep.collectives.group import Group
from lockstep.data.draws import Draws
from lockstep.errors import UsageError
from lockstep.gradients.facts import Facts
from lockstep.gradients.reducer import Reducer
from lockstep.updates.applied import Applied
from lockstep.updates.server.applied_window import AppliedWindow
from lockstep.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
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

    What is written out here is so where all ranks make every step in common; an update whose ranks part between meetings says otherwise.
    """

    name: str

    # -- the optimizer ---------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def bind(self, reducer: Reducer, optimizer: Optimizer) -> None:
        """Take charge of them. Refuses, by name, what it cannot run."""

    @abstractmethod
    def follow(self) -> None:
        """The reducer has laid its parameters, the same or others, in another way. Every rank calls it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state in torch's form, on all ranks. Every rank calls it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over such a state. Every rank calls it with the same."""

    @abstractmethod
    def wholes(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of every group of the optimizer, whole."""

    @abstractmethod
    def pieces(self, name_of: Callable[[Tensor], str]) -> tuple[list[Piece], list[Piece]]:
        """The optimizer's state, "state/parameter" by name: what all ranks have, and what only this one has."""

    @abstractmethod
    def apply(self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler | None) -> Applied:
        """Divide the sums, check that they are finite, clip once, step the optimizer. On a GPU the host waits for nothing that it need not know."""

    # -- the steps -------------------------------------------------------------------------------------------------------------------

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
        """What it keeps beside the model that is equal on all ranks where these are together, by name."""
        return ()

    def overwritten(self) -> Sequence[Tensor]:
        """Flat memory of parameters that every step overwrites with other ranks' results."""
        return ()

    def open(self, world: World, scheduler: LRScheduler | None, clip: float | None, wants_stop: Callable[[], bool]) -> None:
        """After `bind`, before the first window: what it needs of the Stepper. Every rank calls it."""
        return

    def begin(self, window: object, steps: int) -> None:
        """Before the first forward of a window, `steps` after the training's begin."""
        return

    def end(self, steps: int, facts: Facts, own_step: Callable[[], Applied]) -> Ended:
        """The sums are complete, `steps` after the training's begin. `own_step` is this rank's optimizer's, where that is who steps."""
        status.enter("optimizer")
        outcome = own_step()
        return Ended(steps=steps + 1, number=steps + 1, loss=facts.loss, weight=facts.weight, stop=facts.stop > 0, outcome=outcome)

    def meet_if_due(self, ended: Ended) -> bool:
        """The step is counted: meet, where it is time. Every rank calls it; whether some rank was heard to ask to stop."""
        return ended.stop

    def meet(self, *, stop: bool = False) -> bool:
        """Have replicas that have parted meet now. Every rank calls it; whether some rank was heard to ask to stop."""
        return False

    def meet_before(self, step: int) -> None:
        """Have ranks of which each goes its own way meet when `step` steps were taken. Every rank calls it alike."""
        return

    def model(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Of this rank's `weights`: the model that all ranks agree on."""
        return weights


def check_belongs(reducer: Reducer, optimizer: Optimizer) -> None:
    """Raise a UsageError for an optimizer over parameters that are not the reducer's."""
    known = {id(parameter) for parameter in reducer.parameters}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise UsageError(
                    f"the optimizer's parameter group {number} holds a parameter of shape {list(parameter.shape)} that the model does not have: "
                    "build the optimizer from this model's parameters (without ignored ones), after moving or replacing them"
                )
