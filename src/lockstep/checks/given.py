"""What a Stepper is given: a model, an optimizer, a loss and what it counts. Refused with what
to give instead.
"""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.errors import UsageError


def check_kinds(model: object, optimizer: object) -> None:
    """Raise a UsageError unless it is one module, not wrapped by torch, and one optimizer."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise UsageError(
            "not-a-model-and-optimizer",
            model=type(model).__name__,
            optimizer=type(optimizer).__name__,
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError("lazy-parameter", parameter=name)
    if needs_closure(optimizer):
        raise UsageError("optimizer-needs-closure", optimizer=type(optimizer).__name__)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError("optimizer-needs-sparse-gradients")
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UsageError(
                "already-wrapped", module=f"the model's {name!r}" if name else "the model"
            )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether its `step` cannot be called without arguments. A scheduler puts a function of its
    own in the place of the instance's.
    """
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # a builtin that does not tell its parameters
        pass
    return False


def summed(loss: Tensor, weight: float | Tensor, reduction: str) -> Tensor:
    """The sum of losses, checked."""
    if not isinstance(loss, Tensor):
        raise UsageError("loss-not-a-tensor", kind=type(loss).__name__)
    if loss.numel() != 1:
        raise UsageError("loss-not-one-number", what="the loss", shape=list(loss.shape))
    if isinstance(weight, (int, float)) and not 0 <= weight < math.inf:
        raise UsageError(
            "number-out-of-range",
            name="weight",
            value=weight,
            expected="a finite number of at least 0",
        )
    if reduction == "mean":
        if isinstance(weight, (int, float)) and weight == 0:
            # the mean of nothing is nan, and so is its gradient
            return torch.zeros((), device=loss.device)
        if isinstance(weight, Tensor):
            loss = torch.where(weight > 0, loss.reshape(()), 0)
        return loss.reshape(()) * weight
    if reduction != "sum":
        raise UsageError(
            "unknown-choice", name="reduction", value=reduction, choices=("sum", "mean")
        )
    return loss.reshape(())
