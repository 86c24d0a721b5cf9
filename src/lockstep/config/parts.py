"""What a task says of where its model may be cut. Read by model_parallel/ only; a run without
--mesh never looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.errors import TaskError

if TYPE_CHECKING:
    from torch import nn

STYLES = ("colwise", "rowwise")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """All of it is optional: most models can be cut without. Raises TaskError."""

    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """model -> modules of it that, one applied after the other, are the model: for a forward
    that cannot be followed. Each takes and gives one tensor.
    """
    stages: Sequence[str] | None = None
    """The layers (module names, such as "blocks.2") with which stages 1, 2, ... of a pipeline
    begin; None: balanced.
    """
    tensor: Mapping[str, str] = field(default_factory=dict)
    """Module name (`*` stands for one part of it, as in "blocks.*.mixed") -> "colwise" or
    "rowwise": how its weight is split along the tensor axis.
    """
    heads: int | None = None
    """Attention heads, where their projections are split: every rank of the tensor axis takes
    whole ones.
    """

    def __post_init__(self) -> None:
        if self.layers is not None and not callable(self.layers):
            raise TaskError(
                f"Parts: layers is a {type(self.layers).__name__}; it must be a function, model ->"
                " its layers in order"
            )
        if isinstance(self.stages, str) or not all(
            isinstance(name, str) for name in self.stages or ()
        ):
            raise TaskError(
                f"Parts: stages={self.stages!r}; give a list of module names, one for every stage"
                " after the first"
            )
        if self.heads is not None and (
            isinstance(self.heads, bool) or not isinstance(self.heads, int) or self.heads < 1
        ):
            raise TaskError(
                f"Parts: heads={self.heads!r} is no number of attention heads: give a whole number"
                " of at least 1"
            )
        for name, style in self.tensor.items():
            if style not in STYLES:
                raise TaskError(
                    f"Parts: tensor[{name!r}] is {style!r}: choose one of {', '.join(STYLES)}"
                )
