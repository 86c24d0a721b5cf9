"""Run a task's model, loss and metrics on a batch in the task's precision, and check what the
task's functions return.

Autocast covers the model only. The output is converted to float32 before a loss is summed: sums
over a batch need more than the 8 or 11 bits of half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.task import Precision, Task, first_part
from lockstep.data.evaluation_batches import Piece, Rows
from lockstep.data.windows import counted
from lockstep.errors import TaskError, UsageError
from lockstep.runtime import randomness

_NO_STEP = -1  # step number for the random streams of evaluation; no training step has it
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Forward:
    """`forward(batch)` returns the model's output; `forward.loss(output, batch)` returns the
    task's (sum of losses, weight).
    """

    def __init__(
        self, model: nn.Module, task: Task, precision: Precision, device: torch.device
    ) -> None:
        self.model = model
        self._task = task
        self._device = device
        self._dtype = _AUTOCAST.get(precision)
        self._metrics: Any = task.metrics if task.metric_objects is None else None

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Return the positional arguments of a model that is cut into stages. Raises TaskError
        for keyword arguments, which stages cannot take.
        """
        positional, keywords = self._arguments(batch)
        if keywords:
            raise TaskError(
                "wrong-return-type",
                function="Task: inputs",
                type="dict",
                expected="a tuple, because a model that is cut into stages takes positional"
                " arguments",
            )
        return positional

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._task.inputs is first_part:
            self._check_parts(batch)
        return arguments(self._task.inputs(batch), "Task: inputs", TaskError)

    def _check_parts(self, batch: Any) -> None:
        if isinstance(batch, Mapping):
            raise TaskError("batch-needs-inputs", kind=_shape(batch))
        samples = isinstance(batch, (tuple, list)) and all(map(_is_sample, batch))
        if self._task.collate is not None and samples:
            raise TaskError(
                "wrong-return-type",
                function="Task: collate",
                type=f"{type(batch).__name__} of {counted(len(batch), 'sample')}",
                expected="one batch: (inputs, targets) with the samples stacked, such as"
                " torch.utils.data.default_collate(samples)",
            )

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context to run the model, or a stage of it, in."""
        return (
            nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)
        )

    def __call__(self, batch: Any) -> Any:
        positional, keywords = self._arguments(batch)
        if self._dtype is None:
            return self.model(*positional, **keywords)
        with self.autocast():
            output = self.model(*positional, **keywords)
        return as_float32(output)

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, float | Tensor]:
        result: Any = self._task.loss(output, batch)
        if (
            not isinstance(result, (tuple, list))
            or len(result) != 2
            or not isinstance(result[0], Tensor)
        ):
            raise TaskError(
                "wrong-return-type",
                function="Task: loss",
                type=_shape(result),
                expected="(sum of the losses, weight), such as"
                " (F.cross_entropy(..., reduction='sum'), len(y))",
            )
        return result[0], result[1]

    def metrics(self, output: Any, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """Return the task's metrics and "loss", each as (sum, weight)."""
        sums = self._metrics(output, batch) if self._metrics else {}
        sums = checked_sums(sums, "Task: metrics")
        if "loss" in sums:
            raise TaskError("metric-named-loss")
        return {**sums, "loss": self.loss(output, batch)}


def checked_sums(
    sums: Any, function: str, free: Container[str] = ()
) -> Mapping[str, tuple[Any, Any]]:
    """Return `sums`, which a user's function has returned. Raises TaskError if it is not a dict of
    pairs; names in `free` may have other values.
    """
    if not isinstance(sums, Mapping):
        expected = "a dict of name -> (sum, weight)"
        raise TaskError(
            "wrong-return-type", function=function, type=type(sums).__name__, expected=expected
        )
    for name, pair in sums.items():
        if name not in free and not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise TaskError(
                "wrong-return-type",
                function=f"{function}, for {name!r},",
                type=type(pair).__name__,
                expected="(sum, weight), such as (correct.sum(), len(y))",
            )
    return sums


def as_float32(output: Any) -> Any:
    """Convert half-precision tensors in a tensor, tuple, list or dict to float32. Other values
    stay as they are.
    """
    if isinstance(output, Tensor):
        return output.float() if output.dtype in _AUTOCAST.values() else output
    if type(output) in (tuple, list):
        return type(output)(map(as_float32, output))
    if type(output) is dict:
        return {name: as_float32(value) for name, value in output.items()}
    return output


def _is_sample(part: Any) -> bool:
    """Whether `part` looks like a single sample: a tuple with a number and an array or tensor."""
    if not isinstance(part, (tuple, list)):
        return False
    dimensions = [getattr(field, "ndim", 0) for field in part if not isinstance(field, str)]
    return 0 in dimensions and max(dimensions) > 0


def _shape(result: Any) -> str:
    kind = type(result).__name__
    if isinstance(result, (tuple, list)):
        return f"{kind} of {', '.join(type(part).__name__ for part in result) or 'nothing'}"
    if isinstance(result, Mapping):
        parts = (f"{name!r}: {type(value).__name__}" for name, value in result.items())
        return f"dict of {', '.join(parts)}"
    return kind


def arguments(
    inputs: Any, function: str = "inputs", error: type[UsageError] = UsageError
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments in `inputs`, which a function `inputs` returned.
    Raises `error` if they are no tuple, list or mapping.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise error(
        "wrong-return-type",
        function=function,
        type=type(inputs).__name__,
        expected="the model's arguments as a tuple, such as (x,), or as a dict of keywords",
    )


def enter_stream(seed: int, piece: Piece) -> None:
    """Enter the random stream of an evaluation batch's forward."""
    randomness.step(seed, _NO_STEP, piece.number)


def outputs(forward: Callable[[Any], Any], rows: Rows, seed: int) -> Iterator[tuple[Piece, Any]]:
    """Yield each of this rank's batches with the model's output. Each forward has its own random
    stream. Not collective.
    """
    for piece in rows:
        enter_stream(seed, piece)
        yield piece, forward(piece.batch)
