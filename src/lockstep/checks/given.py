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
            f"Stepper(model, optimizer) was given a {type(model).__name__} and a"
            f" {type(optimizer).__name__}: it takes one nn.Module and one torch optimizer (several"
            " models and optimizers: a Stepper each, over the same window)"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"the model's {name} has no shape yet (a lazy layer gets it in its first forward):"
                " run the model on one batch, under torch.no_grad(), and then make the optimizer"
                " and the Stepper"
            )
    if needs_closure(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__}.step() needs a closure, because it computes the loss"
            " several times in a step, and a Stepper's step() has none: choose an optimizer that"
            " steps without one, or use lockstep.DistributedDataParallel and"
            " optimizer.step(closure)"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "SparseAdam needs sparse gradients, and a Stepper sums dense ones: use"
            " lockstep.DistributedDataParallel and optimizer.step(), which keeps those of"
            " nn.Embedding(sparse=True) sparse, or another optimizer"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"{f'{name!r} of the model' if name else 'the model'} is torch's"
                " DistributedDataParallel, which reduces by itself: give .module"
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
        raise UsageError(
            f"backward() takes the loss as a tensor, not a {type(loss).__name__}: without its graph"
            " there is no gradient"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"backward() takes one number, but the loss has shape {list(loss.shape)}: sum it (and"
            " pass what it counts as weight)"
        )
    if isinstance(weight, (int, float)) and not 0 <= weight < math.inf:
        raise UsageError(
            f"weight={weight}: a weight counts samples or tokens; it is finite and not negative"
        )
    if reduction == "mean":
        if isinstance(weight, (int, float)) and weight == 0:
            # the mean of nothing is nan, and so is its gradient
            return torch.zeros((), device=loss.device)
        if isinstance(weight, Tensor):
            loss = torch.where(weight > 0, loss.reshape(()), 0)
        return loss.reshape(()) * weight
    if reduction != "sum":
        raise UsageError(f"reduction={reduction!r}: choose 'sum' or 'mean', whichever the loss is")
    return loss.reshape(())
