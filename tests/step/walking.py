"""What tests of training do again and again: one step over a list of batches, copies of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep.step.step_result import StepResult
from tests import zoo
from tests.zoo import weights as weights


def walk(stepper: lockstep.Stepper, batches: Iterable[Any]) -> StepResult:
    """Take one step of classification over micro-batches of inputs and classes."""
    for x, y in stepper.micro_batches(batches):
        stepper.backward(zoo.loss_sum(stepper.model(x), y), weight=len(y))
    return stepper.step()


def walk_epochs(
    stepper: lockstep.Stepper, loader: lockstep.Loader, epochs: int
) -> list[StepResult]:
    """Take the steps of some epochs of a classification."""
    return [walk(stepper, window) for epoch in loader.epochs(epochs) for window in epoch]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients that there are."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same bits, tensors in dicts and lists too."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
