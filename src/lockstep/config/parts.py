"""What a task says of where its model may be cut. Read by model_parallel/ only; a run without
--mesh never looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.config import knob
from lockstep.config.documented import documented
from lockstep.errors import TaskError

if TYPE_CHECKING:
    from torch import nn

STYLES = ("colwise", "rowwise")


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Where a model may be cut, for `Task.parts`. All of it is optional: most models can be cut
    without. Only a training with --mesh reads it.

    Raises TaskError for a value that cannot work.
    """

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
            kind = type(self.layers).__name__
            raise TaskError("not-a-function", name="Parts.layers", kind=kind)
        if isinstance(self.stages, str) or not all(
            isinstance(name, str) for name in self.stages or ()
        ):
            expected = "a list of module names, one for each stage after the first"
            raise TaskError("wrong-type", name="Parts.stages", value=self.stages, expected=expected)
        if self.heads is not None:
            knob.whole("Parts.heads", self.heads, error=TaskError)
        for name, style in self.tensor.items():
            knob.chosen(f"Parts.tensor[{name!r}]", style, STYLES, error=TaskError)
