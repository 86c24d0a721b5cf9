"""How a model is called to evaluate it or to predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.task import first_part
from lockstep.errors import UsageError
from lockstep.runtime import randomness, status
from lockstep.step.data_parallel import DistributedDataParallel
from lockstep.step.forward import arguments
from lockstep.world.world import World


class Call:
    """`call(batch)` returns the model's output for a batch of a data set.

    `inputs(batch)` returns the positional arguments as a tuple, or the keyword arguments as a dict.
    By default the only argument is the batch itself if it is a tensor, or the first element of a
    tuple or list.
    """

    def __init__(self, model: nn.Module, inputs: Callable[[Any], Any] | None = None) -> None:
        self.model = model
        self._inputs = inputs or _first_argument

    def __call__(self, batch: Any) -> Any:
        positional, keywords = arguments(self._inputs(batch))
        return self.model(*positional, **keywords)


def _first_argument(batch: Any) -> Any:
    if isinstance(batch, Tensor) or (isinstance(batch, (tuple, list)) and batch):
        return first_part(batch)
    raise UsageError("batch-needs-inputs", kind=type(batch).__name__)


def as_arguments(batch: Any) -> Any:
    """Use the whole batch as the model's arguments: a tensor as the only argument, a tuple as the
    positional arguments, a dict as the keywords.
    """
    return (batch,) if isinstance(batch, Tensor) else batch


def bare(model: Any) -> nn.Module:
    """Return the module, or the `.module` of a wrapper. For Lockstep's wrapper it averages
    BatchNorm's statistics first, which is a collective.
    """
    if isinstance(model, DistributedDataParallel):
        if not model.is_copy:
            model.sync_buffers()
        model = model.module
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if not isinstance(model, nn.Module):
        raise UsageError("not-a-module", kind=type(model).__name__)
    return model


def device_of(model: nn.Module, world: World) -> torch.device:
    """Return the device for the model's inputs: that of its first parameter, or this rank's
    device if the model has no parameters.
    """
    return next((parameter.device for parameter in model.parameters()), world.device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In this block every module is in eval mode, without gradients. Afterwards the modes and
    random states are restored.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with randomness.preserved(), torch.no_grad(), status.inside("evaluate"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
