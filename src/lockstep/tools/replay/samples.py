"""The loss of every sample of a step, and the share that a sample has in the step's gradient.

A task's loss is a sum over a micro-batch. Where it is a sum over its rows, the loss of one row is the
loss of that row of the output and the batch. Its gradient is one more backward through the same
micro-batch, under the weights and the random stream that it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.windows import Window
from lockstep.runs import AssembledTraining
from lockstep.runtime import randomness
from lockstep.tools.verify.tracing import indices_of, tensors_of

_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLoss:
    """One sample of a step."""

    index: int
    """Its index in the data set."""
    slot: int
    loss: float
    """Its mean loss: its sum of losses over its weight."""
    share: float = math.nan
    """Its part of the step's gradient: the projection of its gradient on that of the step. The
    shares of all samples add up to 1, and a share can be negative. nan: no update was made.
    """
    description: str = ""
    """What `Task.describe` returns for it."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample's position in this rank's part of a window."""

    micro_batch: int
    row: int
    loss: float


class SampleLosses:
    """The losses of the samples of one window that this rank computes."""

    def __init__(self, training: AssembledTraining, window: Window) -> None:
        self._training = training
        self._window = window
        self._indices = list(indices_of(training.loader, window).values())
        self._batches: list[Any] = []
        self._rows: list[_Row] = []
        self.notes: list[str] = []

    def add(self, index: int, batch: Any, output: Any, total: float) -> None:
        """Compute the losses of the samples of micro-batch `index`, whose sum of losses is
        `total`.
        """
        if self.notes:  # the loss of an earlier micro-batch cannot be divided
            return
        self._batches.append(batch)
        count = len(self._indices[index])
        rows = []
        summed = 0.0
        for row in range(count):
            try:
                with torch.no_grad():
                    loss, weight = self._row_loss(row, count, batch, output)
            except Exception as error:  # the user's loss may need the whole batch
                self._give_up(f"the loss of one row fails: {type(error).__name__}: {error}")
                return
            summed += float(loss)
            mean = float(loss) / float(weight) if float(weight) else 0.0
            rows.append(_Row(index, row, mean))
        same = math.isclose(summed, total, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        if math.isfinite(total) and not same:
            self._give_up(
                "the loss is not a sum over rows: the rows of a micro-batch add up to"
                f" {summed:.6g}, and its loss is {total:.6g}"
            )
            return
        self._rows += rows

    def _give_up(self, reason: str) -> None:
        """Name no samples: those of some micro-batches would not be the step's."""
        self.notes.append(reason)
        self._rows = []

    def _row_loss(self, row: int, count: int, batch: Any, output: Any) -> tuple[Tensor, Any]:
        one_output = row_of(output, row, count)
        return self._training.forward.loss(one_output, row_of(batch, row, count))

    def largest(
        self,
        count: int,
        before: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        scale: float | None,
    ) -> list[SampleLoss]:
        """Return the `count` samples with the highest losses, with their shares.

        Args:
            count: how many samples.
            before: the model's tensors before the step.
            gradients: the step's gradient after the clip, by parameter.
            scale: what the product of a sample's gradient with `gradients` is multiplied by to be
                its share; None if no update was made.
        """
        finite = [row for row in self._rows if not math.isnan(row.loss)]
        rows = [row for row in self._rows if math.isnan(row.loss)]  # the first to look at
        rows += sorted(finite, key=lambda row: -row.loss)
        coupling = _coupling_layers(self._training.model)
        if coupling and rows:
            self.notes.append(
                f"{coupling} computes over the rows of a micro-batch: a sample's loss depends on the"
                " other rows, and its share includes its effect on them"
            )
        samples = []
        for row in rows[:count]:
            samples.append(
                SampleLoss(
                    index=self._indices[row.micro_batch][row.row],
                    slot=self._window.slots[row.micro_batch],
                    loss=row.loss,
                    description=self._description(self._indices[row.micro_batch][row.row]),
                )
            )
        if scale is not None and samples:
            samples = self._with_shares(samples, rows[:count], before, gradients, scale)
        return samples

    def _description(self, index: int) -> str:
        task = self._training.task
        if task.describe is None:
            return ""
        with randomness.preserved():
            randomness.sample(task.seed, self._window.epoch, index)
            try:
                return task.describe(task.train_data[index])
            except Exception as error:  # the user's own: the numbers are still of use
                return f"Task.describe fails: {type(error).__name__}: {error}"

    def _with_shares(
        self,
        samples: Sequence[SampleLoss],
        rows: Sequence[_Row],
        before: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        scale: float,
    ) -> list[SampleLoss]:
        training = self._training
        model = training.model
        tensors = tensors_of(model)
        after = {name: tensor.clone() for name, tensor in tensors.items()}
        by_name = dict(model.named_parameters())
        parameters = [by_name[name] for name in gradients]
        result = []
        try:
            _copy(before, tensors)
            for sample, row in zip(samples, rows, strict=True):
                gradient = self._gradient_of(row, sample.slot, parameters)
                _copy(before, tensors)  # the forward moves BatchNorm's statistics
                product = 0.0
                for one, step_gradient in zip(gradient, gradients.values(), strict=True):
                    if one is not None:
                        product += float((one.double() * step_gradient.double()).sum())
                result.append(replace(sample, share=product * scale))
        finally:
            _copy(after, tensors)
        return result

    def _gradient_of(
        self, row: _Row, slot: int, parameters: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradient of one row's loss."""
        training = self._training
        batch = self._batches[row.micro_batch]
        with randomness.preserved(devices=True), torch.enable_grad():
            randomness.step(training.task.seed, self._window.step, slot)
            output = training.forward(batch)
            loss, _ = self._row_loss(row.row, len(self._indices[row.micro_batch]), batch, output)
            return torch.autograd.grad(loss, parameters, allow_unused=True)


def row_of(value: Any, row: int, count: int) -> Any:
    """Return one row, as a batch of one, of a batch or output of `count` rows. What has no rows is
    returned as it is.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return value[row : row + 1] if value.ndim and len(value) == count else value
    if isinstance(value, Mapping):
        return {name: row_of(part, row, count) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) == count and not any(isinstance(part, Tensor) for part in value):
            return value[row : row + 1]
        parts = [row_of(part, row, count) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _coupling_layers(model: nn.Module) -> str:
    """Return the name of the first layer that computes over the rows of a batch; "" if there is
    none that is known to.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            return f"{name} ({type(module).__name__})"
    return ""


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
