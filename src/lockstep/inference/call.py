"""The model as evaluation and prediction call it: the bare module, with the arguments that a batch has for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data_parallel import DistributedDataParallel
from lockstep.errors import UsageError
from lockstep.world import World


def bare(model: Any) -> nn.Module:
    """The module itself. Given a wrapper, its `.module`; ours averages BatchNorm's statistics first, which is a collective."""
    if isinstance(model, DistributedDataParallel):
        if not model.is_copy:
            model.sync_buffers()
        model = model.module
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}: give a torch.nn.Module, or one that is wrapped")
    return model


def device_of(model: nn.Module, world: World) -> torch.device:
    """Where the model's inputs belong: with its parameters, or on this rank's device if it has none."""
    return next((parameter.device for parameter in model.parameters()), world.device)


class Call:
    """`call(batch)` is the model's output for a batch of a data set.

    `inputs(batch)` gives the positional arguments as a tuple or the keyword arguments as a dict. By default a tensor is the one
    argument, and of a tuple or list the first part is.
    """

    def __init__(self, model: nn.Module, inputs: Callable[[Any], Any] | None = None) -> None:
        self.model = model
        self._inputs = inputs

    def __call__(self, batch: Any) -> Any:
        positional, keywords = arguments(self._default(batch) if self._inputs is None else self._inputs(batch))
        return self.model(*positional, **keywords)

    def _default(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return (batch,)
        if isinstance(batch, (tuple, list)) and batch:
            return (batch[0],)
        raise UsageError(
            f"the data set's batches are of type {type(batch).__name__}: say with inputs= what of them the model gets, such as "
            "inputs=lambda batch: (batch['x'],)"
        )


def arguments(found: Any, of: str = "inputs", error: type[UsageError] = UsageError) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's positional and keyword arguments, from what a function `inputs` has returned. Raises `error` for anything else."""
    if isinstance(found, Mapping):
        return (), dict(found)
    if isinstance(found, (tuple, list)):
        return tuple(found), {}
    raise error(f"{of} returned a {type(found).__name__}: return the model's arguments as a tuple, such as (x,), or as a dict of keywords")


def as_arguments(batch: Any) -> Any:
    """A whole batch as the model's arguments: a tensor is the one, a tuple all positional ones, a dict the keywords."""
    return (batch,) if isinstance(batch, Tensor) else batch
