"""Where a task's model may be cut. Only model_parallel/ uses it, in runs with --mesh."""

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
    """Where a model may be cut, for `Task.parts`. All fields are optional: most models can be cut
    without them. Only a training with --mesh uses them.

    Raises TaskError for an invalid value.
    """

    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """model -> a list of its modules. Applied one after the other they must compute the model. Each
    takes and returns one tensor. Needed if torch.fx cannot trace the forward.
    """
    stages: Sequence[str] | None = None
    """Module names, such as "blocks.2": the first layers of stages 1, 2, ... of a pipeline. None:
    balanced stages.
    """
    tensor: Mapping[str, str] = field(default_factory=dict)
    """Module name (`*` stands for one part of it, as in "blocks.*.mixed") -> "colwise" or
    "rowwise": how its weight is split along the tensor axis.
    """
    heads: int | None = None
    """Number of attention heads, if their projections are split. Every rank of the tensor axis then
    gets whole heads.
    """

    def __post_init__(self) -> None:
        if self.layers is not None and not callable(self.layers):
            kind = type(self.layers).__name__
            raise TaskError("not-a-function", name="Parts.layers", kind=kind)
        stages = self.stages or ()
        if isinstance(self.stages, str) or not all(isinstance(name, str) for name in stages):
            expected = "a list of module names, one for each stage after the first"
            raise TaskError(
                "wrong-value", name="Parts.stages", value=self.stages, expected=expected
            )
        if self.heads is not None:
            knob.whole("Parts.heads", self.heads, error=TaskError)
        for name, style in self.tensor.items():
            knob.chosen(f"Parts.tensor[{name!r}]", style, STYLES, error=TaskError)
