"""What a rank of a mesh holds of the model, as the Stepper needs to know it.

The Stepper sums gradients along the data axis, of parameters that are plain tensors of this rank; everything else that ranks of one
replica have to do with each other goes through this object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.mesh.layout import Mesh


class Held(Protocol):
    """This rank's part of a model that is split."""

    mesh: Mesh
    module: nn.Module
    """Its parameters as plain local tensors, under the names that they have in the whole model."""

    @property
    def data(self) -> Group:
        """The ranks with the same part of it, among which gradients are summed."""
        ...

    @property
    def replica(self) -> Group:
        """The ranks that hold one whole model between them."""
        ...

    @property
    def reports(self) -> bool:
        """Whether this rank tells the weights and losses of its micro-batches; of those that walk the same ones, one does."""
        ...

    def collect(self) -> None:
        """After the last backward: bring the gradients to the parameters of `module`. Every rank calls it."""
        ...

    def counted(self, name: str) -> bool:
        """Whether this rank's part of a parameter counts in a norm over the whole model: no element may count twice."""
        ...

    def optimizer_name(self, name: str) -> str:
        """The name in the whole model under which checkpoints know a parameter's optimizer state."""
        ...

    def form(self, stepper: Any) -> Any:
        """How checkpoints see the model that a Stepper trains (stepper_state.Form)."""
        ...

    def sent(self) -> int:
        """Bytes that this rank has sent along the axes, as far as our own groups count them."""
        ...


class SplitNorm:
    """The norm of a gradient of which every rank of a replica has a part."""

    def __init__(self, held: Held) -> None:
        self._held = held

    def __call__(
        self, gradients: Iterable[tuple[str, Tensor]], divisor: float, device: torch.device, *, spread: Sequence[Group] = ()
    ) -> Tensor:
        """From this rank's gradients by name, divided; those of parameters that do not count are left out. float64, 0-d. A collective.

        Ranks along the data axis may sum in ways of their own, some of which have divided already: each brings its own `divisor`. `spread`: groups
        whose members have different parts of these.
        """
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for name, gradient in gradients:
            if self._held.counted(name):
                squares += torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)).double().square()
        squares /= divisor**2
        for group in (*spread, self._held.replica):
            group.all_reduce_small(squares, place="for the gradient's norm").wait()
        return squares.sqrt()
