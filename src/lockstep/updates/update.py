"""What an update is: who applies the summed gradients to the parameters, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.checkpoints.pieces import Piece
from lockstep.errors import UsageError
from lockstep.gradients.reading import Reading
from lockstep.gradients.reducer import Reducer


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


class Update(Protocol):
    """One per reducer and optimizer."""

    name: str

    def bind(self, reducer: Reducer, optimizer: Optimizer) -> None:
        """Take charge of them. Refuses, by name, what it cannot run."""
        ...

    def follow(self) -> None:
        """The reducer has laid its parameters, the same or others, in another way. Every rank calls it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state in torch's form, on all ranks. Every rank calls it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over such a state. Every rank calls it with the same."""
        ...

    def wholes(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of every group of the optimizer, whole."""
        ...

    def pieces(self, name_of: Callable[[Tensor], str]) -> tuple[list[Piece], list[Piece]]:
        """The optimizer's state, "state/parameter" by name: what all ranks have, and what only this one has."""
        ...

    def apply(self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler | None) -> Applied:
        """Divide the sums, check that they are finite, clip once, step the optimizer. On a GPU the host waits for nothing that it need not know."""
        ...


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
