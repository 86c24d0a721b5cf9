"""What goes from stage to stage, before it goes: every rank must have a place for it, and nothing
may be unpickled to learn how large.

The stages are run once, one after the other, without gradients, on the first rank's real input and
on zeros after it, and each tells all ranks in JSON what it gave, or what went wrong: then all
raise, and nobody waits for a message that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.broadcast_json import said_by
from lockstep.collectives.group import Group
from lockstep.errors import PeerFailed, TaskError
from lockstep.model_parallel.stages import check_tensor, described
from lockstep.runtime import randomness

# what torch's modules raise at a shape that they do not take
_MISFIT = (RuntimeError, ValueError, IndexError)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @property
    def differentiable(self) -> bool:
        """Whether a gradient goes back for it. It does for all that can have one, also where
        nobody needs it: what is frozen may change.
        """
        return self.dtype.is_floating_point or self.dtype.is_complex

    def example(self) -> Tensor:
        """A tensor like it that takes no memory."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.differentiable
        )


def signature(arguments: Any) -> Any:
    """Equal for a model's arguments between which no shape differs."""
    if isinstance(arguments, Tensor):
        return Shape.of(arguments)
    if isinstance(arguments, (tuple, list)):
        return type(arguments).__name__, *map(signature, arguments)
    if isinstance(arguments, Mapping):
        return "mapping", *((name, signature(value)) for name, value in arguments.items())
    return type(arguments).__name__, (
        repr(arguments) if isinstance(arguments, (int, float, str, bool, type(None))) else ""
    )


def between(
    stages: Mapping[int, nn.Module],
    count: int,
    group: Group,
    device: torch.device,
    arguments: Sequence[Any],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> list[Shape]:
    """What stages 0 .. count-2 give for a micro-batch of such `arguments`. Stage s is on rank s
    modulo the ranks. Collective.

    Randomness and buffers are as before. Raises TaskError on all ranks where what one stage gives
    does not fit the next or is no tensor; where a stage raises something else, its own rank raises
    that and the others PeerFailed.
    """
    found: list[Shape] = []
    who: list[str] = []
    for number in range(count):
        problem: Exception | None = None
        said: dict[str, Any] = {}
        if number in stages:
            arriving = found[-1] if found else None
            try:
                output = _tried(
                    stages[number],
                    arguments if arriving is None else _zeros(arriving, device),
                    autocast,
                )
                said = _what_it_gave(stages[number], output, number, count)
            except Exception as error:
                problem = error
                said = _what_went_wrong(stages[number], error, number, arriving, who)
        said = said_by(number % group.size, said, group.host, "for the shapes between stages")
        if "problem" in said:
            _fail(said, problem, number % group.size)
        who.append(said["who"])
        if number + 1 < count:
            found.append(Shape(tuple(said["shape"]), getattr(torch, said["dtype"])))
    return found


def _zeros(arriving: Shape, device: torch.device) -> tuple[Tensor]:
    return (torch.zeros(arriving.shape, dtype=arriving.dtype, device=device),)


def _tried(
    stage: nn.Module, arguments: Sequence[Any], autocast: Callable[[], AbstractContextManager[Any]]
) -> Any:
    # a BatchNorm counts what it sees
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    with torch.no_grad(), randomness.preserved(devices=True), autocast():
        return torch.func.functional_call(stage, buffers, tuple(arguments))


def _what_it_gave(stage: nn.Module, output: Any, number: int, count: int) -> dict[str, Any]:
    said: dict[str, Any] = {"who": described(stage)}
    if number + 1 < count:
        tensor = check_tensor(output, *last_layer(stage, number))
        said |= {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    return said


def last_layer(stage: nn.Module, number: int) -> tuple[str, str]:
    """The name and the class of a stage's last layer, for messages."""
    names = getattr(stage, "layer_names", (f"stage {number}",))
    return names[-1], getattr(stage, "last_class", type(stage).__name__)


def _what_went_wrong(
    stage: nn.Module, error: Exception, number: int, arriving: Shape | None, who: Sequence[str]
) -> dict[str, Any]:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, TaskError):
        return {"problem": reason, "everybodys": True}
    here = f"stage {number} ({described(stage)})"
    if arriving is None or type(error) not in _MISFIT:
        return {"problem": f"{here} raised {type(error).__name__}: {reason}", "everybodys": False}
    problem = TaskError(
        "stages-do-not-fit",
        stage=here,
        before=f"stage {number - 1} ({who[-1]})",
        gives=str(arriving),
        reason=reason,
    )
    return {"problem": str(problem), "everybodys": True}


def _fail(said: dict[str, Any], problem: Exception | None, rank: int) -> None:
    if said["everybodys"]:
        raise TaskError(said["problem"]) from problem
    if problem is not None:
        raise problem
    raise PeerFailed("pipeline-rank-failed", rank=rank, problem=said["problem"])
