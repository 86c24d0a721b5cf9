"""Assign layers to pipeline stages: as the user says, else balanced by the number of parameters.
Also the names and gradients of parameters that several stages share.

A parameter may have several names, and be on several stages, such as an embedding that is also the
head. The names are recorded before the model is cut, so that a rank with a part of the model uses
the same names as one process would.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import nn

from lockstep.checkpoints.form import forms_of
from lockstep.checks.identity import weights
from lockstep.collectives.group import Group
from lockstep.config.parts import Parts
from lockstep.errors import UsageError
from lockstep.model_parallel.layers import Layers
from lockstep.model_parallel.stages import stage_module


def cut(layers: Layers, stages: int, parts: Parts | None = None) -> list[range]:
    """Return the layers of every stage: from `parts.stages` if it is given, else balanced by the
    numbers of parameters. Raises UsageError for impossible stages.
    """
    if not 1 <= stages <= len(layers):
        raise UsageError(
            "too-few-layers", stages=stages, count=len(layers), layers=list(layers.names)
        )
    if parts is not None and parts.stages is not None:
        return _as_named(layers.names, parts.stages, stages)
    return balanced(by_parameters(layers), stages)


def by_parameters(layers: Layers) -> list[float]:
    """Return the number of parameters of each layer. It is a poor estimate of time if layers
    without parameters take long.
    """
    counts = []
    for number in range(len(layers)):
        module = stage_module(layers, range(number, number + 1))
        counts.append(float(sum(parameter.numel() for parameter in module.parameters())))
    return counts


def balanced(costs: Sequence[float], stages: int) -> list[range]:
    """Return consecutive, non-empty ranges of layers with the smallest maximum sum of `costs`.
    Among equal maxima it prefers a small sum of squares, then early cuts.
    """
    sums = [0.0, *itertools.accumulate(map(float, costs))]
    largest, _ = _smallest(sums, stages, max)

    def add_square(total: float, cost: float) -> float:
        if cost <= largest:
            return total + cost * cost
        return math.inf

    _, starts = _smallest(sums, stages, add_square)
    return _ranges(starts, len(costs))


def _ranges(starts: Sequence[int], stop: int) -> list[range]:
    return [range(start, end) for start, end in itertools.pairwise([*starts, stop])]


def _smallest(
    sums: Sequence[float], stages: int, add: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the smallest value over all ways to cut, and the first layer of each of its stages.
    Among equal values it returns the earliest cuts. `sums` are the prefix sums of the costs.
    """

    @cache
    def best(stop: int, count: int) -> tuple[float, list[int]]:
        """Return the same for the first `stop` layers in `count` stages."""
        smallest = math.inf
        starts = []
        if count == 0 and stop == 0:
            smallest = 0.0
        if count > 0:
            for start in range(count - 1, stop):
                before, earlier = best(start, count - 1)
                value = add(before, sums[stop] - sums[start])
                if value < smallest:
                    smallest = value
                    starts = [*earlier, start]
        return smallest, starts

    return best(len(sums) - 1, stages)


def _as_named(names: Sequence[str], first: Sequence[str], stages: int) -> list[range]:
    """Return the stages that begin at the layers `first`, the first stage aside."""
    for name in first:
        if name not in names:
            raise UsageError("unknown-layer", layer=name, layers=list(names))
    starts = [0, *(names.index(name) for name in first)]
    if len(starts) != stages or starts != sorted(set(starts)):
        raise UsageError(
            "stages-out-of-order", stages=list(first), needed=stages - 1, layers=list(names)
        )
    return _ranges(starts, len(names))


class ModelNames:
    """The names, shapes and dtypes of the tensors of `model`, taken before it is cut."""

    def __init__(self, model: nn.Module) -> None:
        self.forms = forms_of(weights(model).items())
        """Shape and dtype of all tensors, by their names in checkpoints."""
        self.parameters = tuple(name for name, _ in model.named_parameters())
        """The first name of each parameter, in the model's order."""
        self.size = sum(parameter.numel() for parameter in model.parameters())
        """The number of elements of all parameters."""
        self._names: dict[str, list[str]] = {}
        by_tensor: dict[int, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names = by_tensor.setdefault(id(tensor), [])
            names.append(name)
            self._names[name] = names

    def first(self, name: str) -> str:
        """Return the first name of a tensor in the model. Its optimizer state has this name."""
        return self._names.get(name, [name])[0]

    def stored(self, name: str) -> str:
        """Return the name of a tensor in checkpoints (`identity.weights`)."""
        return min(self._names.get(name, [name]))

    def shared(self, stages: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
        """Return the parameters that several stages use: the numbers of these stages, by the
        parameter's first name. Their gradients must be summed over the stages.
        """
        users: dict[str, list[int]] = {}
        for number, stage in enumerate(stages):
            for name in {self.first(name) for name, _ in stage.named_parameters()}:
                users.setdefault(name, []).append(number)
        return {name: tuple(numbers) for name, numbers in sorted(users.items()) if len(numbers) > 1}


class TiedStages:
    """The parameters that several stages share. `stages`: the ranks of the pipeline that use such a
    parameter, by its first name. `module` holds this rank's parameters.
    """

    def __init__(
        self,
        stages: Mapping[str, tuple[int, ...]],
        names: ModelNames,
        module: nn.Module,
        pipeline: Group,
    ) -> None:
        self._stages = stages
        self._names = names
        self._pipeline = pipeline
        self._local = {names.first(name): value for name, value in module.named_parameters()}
        self._device = next(module.parameters()).device

    def is_first(self, name: str) -> bool:
        """Whether no earlier rank of the pipeline holds the same parameter."""
        stages = self._stages.get(self._names.first(name))
        return stages is None or self._pipeline.rank == stages[0]

    def sum_gradients(self) -> None:
        """Sum the gradient of each shared parameter over the stages that use it. Ranks without the
        parameter add zeros. Collective.
        """
        for name, stages in self._stages.items():
            shape, dtype = self._names.forms[self._names.stored(name)]
            # the last element counts the ranks with a gradient: none, without micro-batches
            total = torch.zeros(math.prod(shape) + 1, dtype=dtype, device=self._device)
            parameter = self._local[name] if self._pipeline.rank in stages else None
            if parameter is not None and parameter.grad is not None:
                total[:-1] = parameter.grad.reshape(-1)
                total[-1] = 1
            self._pipeline.all_reduce(
                total, place=f"for the gradient of {name}, which several stages use"
            ).wait()
            if parameter is None or total[-1] == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(total[:-1].view(shape))
