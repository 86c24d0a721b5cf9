"""A training that is computed again on this rank: from a checkpoint, or from the seed, up to the
steps that are looked at. The run directory is only read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.runs import AssembledTraining
from lockstep.tools.replay.export import StepFiles
from lockstep.tools.replay.samples import SampleLoss, SampleLosses
from lockstep.tools.verify.tracing import tensors_of

Point = Literal["forward", "backward", "step"]
_UPDATES = 5  # parameters whose updates are reported


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedMicroBatch:
    """A micro-batch of a step that was computed again."""

    slot: int
    samples: int
    weight: float
    loss: float
    """The mean loss: the sum of losses over the weight; nan for weight 0."""
    gradient_norm: float
    """The norm of the gradient of the mean loss; nan for weight 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterUpdate:
    """How far a step moved a parameter."""

    name: str
    norm: float
    """The norm of the update."""
    relative: float
    """The norm of the update over the norm of the weights; inf for weights that were all 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputedStep:
    """A step that was computed again. Steps and epochs count from 1. The fields from
    `micro_batches` on are those of a step that was looked at.
    """

    step: int
    epoch: int
    loss: float
    weight: float
    lr: float
    skipped: str | None
    """Why no update was made; None if one was made."""
    micro_batches: Sequence[ReplayedMicroBatch] = ()
    """Those of this rank."""
    gradient_norm: float = math.nan
    """The norm of the step's gradient before the clip."""
    clipped_norm: float = math.nan
    """The norm after the clip."""
    updates: Sequence[ParameterUpdate] = ()
    """The largest updates against their weights, the largest first."""
    samples: Sequence[SampleLoss] = ()
    """This rank's samples with the highest losses, the highest first."""
    notes: Sequence[str] = ()
    """What to know about the samples' numbers, or why there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """What to do in the steps from `first` to `last`, counted from 1."""

    first: int
    last: int
    samples: int = 0
    """How many samples with the highest losses to name."""
    stop: Point | None = None
    """Where to open the debugger: before the forward or the backward of the micro-batch of `slot`,
    or before the optimizer's step.
    """
    slot: int = 0
    folder: Path | None = None
    """Where to write the tensors of the micro-batch of `slot`."""


class GradientProbe:
    """Measures the gradient of one micro-batch while its backward runs."""

    def __init__(self, model: nn.Module) -> None:
        self._open = False
        self._squared = 0.0
        self._scale = 1.0
        self._keeps = False
        self._gradients: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._add, name))

    def begin(self, loss: Tensor, *, keeps: bool) -> None:
        """Measure from here to `end`. `keeps`: also copy the gradients."""
        self._open = True
        self._squared = 0.0
        self._scale = 1.0
        self._keeps = keeps
        self._gradients = {}
        if loss.requires_grad:
            loss.register_hook(self._record_scale)

    def end(self, weight: float) -> tuple[float, dict[str, Tensor]]:
        """Return the norm of the gradient of the mean loss, and the copied gradients by name."""
        self._open = False
        if weight == 0:
            return math.nan, {}
        factor = 1 / (self._scale * weight)
        gradients = {name: gradient * factor for name, gradient in self._gradients.items()}
        return math.sqrt(self._squared) * factor, gradients

    def _record_scale(self, gradient: Tensor) -> None:
        """The gradient of the loss itself is the factor that fp16's loss scaling gave it."""
        self._scale = float(gradient)

    def _add(self, name: str, gradient: Tensor) -> None:
        if self._open:
            self._squared += _squared_norm(gradient)
            if self._keeps:
                self._gradients[name] = gradient.detach().to_dense().clone()


class Replay:
    """Computes steps of a training again on this rank, without evaluations and records."""

    def __init__(self, training: AssembledTraining) -> None:
        self._training = training
        self._probe: GradientProbe | None = None

    def steps(self, detail: Detail) -> Iterator[ComputedStep]:
        """Compute all steps up to `detail.last`, and look at those from `detail.first` on."""
        if detail.samples and not hasattr(self._training.loader, "batch_plan"):
            raise UsageError("samples-of-a-stream")
        for window in self._training.windows():
            step = window.step + 1
            if step > detail.last:  # the last ones were left out
                return
            if step < detail.first:
                yield self._pass_through(window)
            else:
                yield self._look_at(window, detail)
            if step == detail.last:
                return

    def _pass_through(self, window: Window) -> ComputedStep:
        lr = self._learning_rate
        return _summary(window, lr, self._training.step(window))

    @property
    def _learning_rate(self) -> float:
        return float(self._training.optimizer.param_groups[0]["lr"])

    def _look_at(self, window: Window, detail: Detail) -> ComputedStep:
        """Do what `step` does, and measure it."""
        training = self._training
        model = training.model
        if self._probe is None:
            self._probe = GradientProbe(model)
        before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
        lr = self._learning_rate
        slots = len(window.cut.filled(0, 1))
        if detail.slot >= slots:
            raise UsageError(
                "slot-not-there", slot=detail.slot, step=window.step + 1, last=slots - 1
            )
        files = None if detail.folder is None else StepFiles(detail.folder, before)
        losses = SampleLosses(training, window) if detail.samples else None
        run = training.stepper.open(window)
        micro_batches = self._micro_batches(run, window, detail, losses, files)
        if detail.stop == "step":
            _, divisor = run.complete()
            print(
                f"replay: before the update: the gradient is .grad / divisor of a parameter of `model`; {divisor=}"
            )
            breakpoint()  # the option --break step
        result = training.stepper.step()
        gradients = gradients_of(model)
        # after a synchronization of local steps nothing is left in `.grad`
        clipped = norm_of(gradients.values()) if gradients else math.nan
        norm = clipped if result.norm is None else result.norm
        samples: Sequence[SampleLoss] = ()
        if losses is not None:
            scale = None
            if result.applied and norm > 0:  # clipped / norm / weight, over the square of clipped
                scale = 1 / (norm * result.weight * clipped)
            samples = losses.largest(detail.samples, before, gradients, scale)
        if files is not None:
            files.write(training, window, gradients)
        return replace(
            _summary(window, lr, result),
            micro_batches=micro_batches,
            gradient_norm=norm,
            clipped_norm=clipped,
            updates=_largest_updates(before, model),
            samples=samples,
            notes=() if losses is None else losses.notes,
        )

    def _micro_batches(
        self,
        run: Any,
        window: Window,
        detail: Detail,
        losses: SampleLosses | None,
        files: StepFiles | None,
    ) -> list[ReplayedMicroBatch]:
        """Compute this rank's micro-batches of an open window."""
        training = self._training
        assert self._probe is not None
        micro_batches = []
        for index, batch in enumerate(run.walk(window)):
            slot = window.slots[index]
            selected = slot == detail.slot
            loss, weight, output = self._forward(batch, detail.stop if selected else None)
            self._probe.begin(loss, keeps=selected and files is not None)
            training.stepper.backward(loss, weight)
            weight = float(weight)
            norm, gradients = self._probe.end(weight)
            total = float(loss.detach())
            micro_batch = ReplayedMicroBatch(
                slot=slot,
                samples=window.counts[index],
                weight=weight,
                loss=total / weight if weight else math.nan,
                gradient_norm=norm,
            )
            micro_batches.append(micro_batch)
            if losses is not None:
                losses.add(index, batch, output, total)
            if selected and files is not None:
                files.add_micro_batch(micro_batch, batch, gradients)
        return micro_batches

    def _forward(self, batch: Any, stop: Point | None) -> tuple[Tensor, float | Tensor, Any]:
        """Return the sum of losses, the weight, and the model's output for a micro-batch."""
        forward = self._training.forward
        if stop == "forward":
            print("replay: before the forward of `batch` by `forward.model`")
            breakpoint()  # the option --break forward
        output = forward(batch)
        loss, weight = forward.loss(output, batch)
        if stop == "backward":
            print(
                "replay: before the backward of `loss`; `forward.model`, `batch` and `output` are there"
            )
            breakpoint()  # the option --break backward
        return loss, weight, output


def _summary(window: Window, lr: float, result: Any) -> ComputedStep:
    """Return what is known of a step that was not looked at. `lr`: before its scheduler."""
    return ComputedStep(
        step=result.step,
        epoch=window.epoch + 1,
        loss=result.loss,
        weight=result.weight,
        lr=lr,
        skipped=result.reason,
    )


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of each parameter that has one, by name, as dense tensors."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.detach().to_dense()
    return gradients


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the norm of all tensors together, in double precision."""
    return math.sqrt(sum(_squared_norm(tensor) for tensor in tensors))


def _largest_updates(before: Mapping[str, Tensor], model: nn.Module) -> list[ParameterUpdate]:
    updates = []
    for name, parameter in model.named_parameters():
        update = norm_of([parameter.detach() - before[name]])
        weight = norm_of([before[name]])
        if update:
            relative = update / weight if weight else math.inf
            updates.append(ParameterUpdate(name=name, norm=update, relative=relative))
    updates.sort(key=lambda update: -update.relative)
    return updates[:_UPDATES]


def _squared_norm(tensor: Tensor) -> float:
    dense = tensor.detach().to_dense()
    wide = torch.complex128 if dense.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(dense.to(wide))) ** 2
