"""Estimates the gradient noise scale: the global batch beyond which more samples in a step, and so
more workers, stop helping.

    |G|^2                           squared norm of the true gradient
    tr S                            variance of one sample's gradient, summed over its elements
    E |G_B|^2 = |G|^2 + tr S / B    for G_B, the mean gradient of B samples

Two batch sizes give two equations. So the gradient norms of each micro-batch and of the whole step
give unbiased estimates of both unknowns, which are averaged over steps. Their ratio tr S / |G|^2 is
the noise scale, in samples (McCandlish et al., "An empirical model of large-batch training", 2018,
appendix A.1). At that batch a training needs twice the minimum number of steps, and twice the
minimum number of samples. Below it, doubling the batch nearly halves the steps; beyond it, it saves
few. The scale grows during a training, so an estimate is valid for one part of the training.

The estimate ignores that batch normalisation couples the samples of a micro-batch, and that Adam
does not follow the plain gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lockstep.config.knob import whole
from lockstep.config.task import Task
from lockstep.errors import UsageError
from lockstep.launcher.launch import launch
from lockstep.runtime import randomness
from lockstep.step.forward import Forward, matmul_precision
from lockstep.training.build import loader_of, model_of, optimizer_of
from lockstep.world.world import World, init


@dataclass(frozen=True, slots=True)
class Norms:
    """Squared norms of the mean gradients of one step."""

    small: float
    """Squared norm of a micro-batch's gradient, averaged over the micro-batches."""
    big: float
    """Squared norm of the whole step's gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseScale:
    """The estimate, averaged over steps."""

    squared: float
    """Estimate of |G|^2; 0 or negative if noise hides the gradient."""
    variance: float
    """Estimate of tr S."""
    error: float
    """Relative standard error of `samples`, by the jackknife: each step is left out in turn.
    Infinite if it cannot be estimated.
    """
    steps: int
    micro_batch: int
    global_batch: int

    @property
    def samples(self) -> float | None:
        """The noise scale; None if the gradient cannot be distinguished from noise."""
        return self.variance / self.squared if self.squared > 0 else None

    def describe(self) -> str:
        """Describe the scale, the data that it is estimated from, and its error."""
        rests = (
            f"from {self.steps} steps of {self.global_batch} samples in micro-batches of"
            f" {self.micro_batch}"
        )
        if self.samples is None:
            return (
                f"gradient noise scale: the gradient cannot be distinguished from noise ({rests}):"
                f" it is far above a batch of {self.global_batch}; measure more steps"
            )
        if self.samples <= 0:
            return f"gradient noise scale: no noise was found ({rests}): larger batches do not help"
        return (
            f"gradient noise scale {self.samples:.3g} samples, +- {100 * self.error:.0f} %"
            f" ({rests}): beyond a global batch of about {self.samples:.2g} more workers stop"
            " helping"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "relative_error": self.error if math.isfinite(self.error) else None,
            "squared_gradient": self.squared,
            "variance": self.variance,
            "steps": self.steps,
        }


def estimate(norms: Sequence[Norms], *, micro_batch: int, global_batch: int) -> NoiseScale:
    """Estimate the noise scale from the norms of at least two steps of equal size: an estimate of
    the error needs two.
    """
    assert len(norms) >= 2
    assert 0 < micro_batch < global_batch
    small, big = np.array([(each.small, each.big) for each in norms]).T
    # one value per step; both are unbiased
    squared = (global_batch * big - micro_batch * small) / (global_batch - micro_batch)
    variance = (small - big) / (1 / micro_batch - 1 / global_batch)
    return NoiseScale(
        squared=float(squared.mean()),
        variance=float(variance.mean()),
        error=_jackknife(squared, variance),
        steps=len(norms),
        micro_batch=micro_batch,
        global_batch=global_batch,
    )


def _jackknife(squared: NDArray[Any], variance: NDArray[Any]) -> float:
    """Return the relative standard error of the ratio of the means, leaving out each step in
    turn.
    """
    rest = squared.sum() - squared
    if squared.sum() <= 0 or variance.sum() <= 0 or (rest <= 0).any():
        return math.inf
    ratios = (variance.sum() - variance) / rest
    spread = math.sqrt((len(ratios) - 1) * ratios.var())
    return float(spread * squared.sum() / variance.sum())


def norms_of(model: nn.Module, losses: Sequence[Callable[[], Tensor]]) -> Norms:
    """Return the norms of one step. Each of `losses` computes the mean loss of a micro-batch. The
    step's mean gradient is left in `.grad`.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    sums = [torch.zeros_like(each, dtype=torch.float32) for each in trained]
    small = 0.0
    for loss in losses:
        for each in trained:
            each.grad = None
        loss().backward()
        for total, each in zip(sums, trained, strict=True):
            if each.grad is not None:
                total += each.grad
                small += float(each.grad.double().square().sum())
    for total, each in zip(sums, trained, strict=True):
        each.grad = (total / len(losses)).to(each.dtype)
    big = sum(float((total.double() / len(losses)).square().sum()) for total in sums)
    return Norms(small / len(losses), big)


def noise_scale_of(source: Callable[[], Task], *, steps: int = 40) -> NoiseScale:
    """Estimate the noise scale of a task over its first steps, which train the model in a new
    single process. Raises UsageError and WorkerFailed.
    """
    whole("steps", steps, least=2)
    task = source()
    if task.global_batch < 2 * task.micro_batch or task.global_batch % task.micro_batch:
        raise UsageError(
            "noise-scale-batches", global_batch=task.global_batch, micro_batch=task.micro_batch
        )
    norms = [Norms(*each) for each in launch(_measure, workers=1, args=(source, steps))[0]]
    if len(norms) < 2:
        raise UsageError("noise-scale-steps", epochs=task.epochs, count=len(norms))
    return estimate(norms, micro_batch=task.micro_batch, global_batch=task.global_batch)


def _measure(source: Callable[[], Task], steps: int) -> list[tuple[float, float]]:
    """Return each step's (small, big) of `Norms`, as plain numbers that can be sent back."""
    task = source()
    with init(backend="gloo") as world, matmul_precision(task.precision):
        return [(each.small, each.big) for each in _walk(task, world, steps)]


def _walk(task: Task, world: World, steps: int) -> list[Norms]:
    randomness.shared(task.seed)
    model = model_of(task).to(world.device)
    optimizer = optimizer_of(task, model)
    forward = Forward(
        model, task, "fp32" if task.precision == "fp16" else task.precision, world.device
    )

    def mean_loss(batch: Any) -> Tensor:
        total, weight = forward.loss(forward(batch), batch)
        return total / weight

    found: list[Norms] = []
    for epoch in loader_of(task, world).epochs(task.epochs):
        for window in epoch:
            if window.samples == task.global_batch:
                found.append(norms_of(model, [partial(mean_loss, batch) for batch in window]))
                optimizer.step()
            if len(found) == steps:
                return found
    return found
