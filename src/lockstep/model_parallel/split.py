"""Assign layers to pipeline stages: as the user says, else balanced by the cost of each layer. Also
the names and gradients of parameters that several stages share.

A parameter may have several names, and be on several stages, such as an embedding that is also the
head. The names are recorded before the model is cut, so that a rank with a part of the model uses
the same names as one process would.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoints.identity import weights
from lockstep.collectives.group import Group
from lockstep.config.parts import Parts
from lockstep.errors import PeerFailed, UsageError
from lockstep.model_parallel.layers import Layers
from lockstep.model_parallel.stages import check_tensor, stage_module
from lockstep.runtime import randomness
from lockstep.step.model_shard import forms_of


def cut(
    layers: Layers, stages: int, parts: Parts | None = None, costs: Sequence[float] | None = None
) -> list[range]:
    """Return the layers of every stage: from `parts.stages` if it is given, else balanced by
    `costs` (by default the numbers of parameters). Raises UsageError for impossible stages.
    """
    if parts is not None and parts.stages is not None:
        return _as_named(layers.names, parts.stages, stages)
    return balanced(by_parameters(layers) if costs is None else costs, stages, layers.names)


def balanced(costs: Sequence[float], stages: int, names: Sequence[str] = ()) -> list[range]:
    """Return consecutive, non-empty ranges of layers with the smallest maximum sum of `costs`.
    Among these it chooses the smallest sum of squares, then the earliest cuts.

    `names` are the names of the layers for the error message. Raises UsageError for more stages
    than layers.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise UsageError(
            "too-few-layers", stages=stages, count=count, layers=list(names or range(count))
        )
    sums = [0.0, *itertools.accumulate(float(cost) for cost in costs)]
    largest = _smallest(sums, stages, lambda before, part: max(before, part))[0]
    starts = _smallest(
        sums, stages, lambda before, part: before + part * part if part <= largest else math.inf
    )[1]
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, count])]


def _smallest(
    sums: Sequence[float], stages: int, add: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the smallest value over all ways to cut, and the first layer of each of its stages.
    Among equal values it returns the earliest cuts. `sums` are the prefix sums of the costs.
    """

    @cache
    def best(stop: int, count: int) -> tuple[float, list[int]]:
        """Return the same for the first `stop` layers in `count` stages."""
        if count == 0:
            return (0.0 if stop == 0 else math.inf), []
        found = math.inf, list[int]()
        for start in range(count - 1, stop):
            value, starts = best(start, count - 1)
            value = add(value, sums[stop] - sums[start])
            if value < found[0]:
                found = value, [*starts, start]
        return found

    return best(len(sums) - 1, stages)


def _as_named(names: Sequence[str], begins: Sequence[str], stages: int) -> list[range]:
    if len(begins) != stages - 1:
        raise UsageError(
            "stages-not-all-named",
            stages=list(begins),
            given=len(begins),
            count=stages,
            needed=stages - 1,
            layers=list(names),
        )
    for name in begins:
        if name not in names:
            raise UsageError("unknown-layer", layer=name, layers=list(names))
    starts = [0, *(names.index(name) for name in begins)]
    for (before, after), name in zip(itertools.pairwise(starts), begins, strict=True):
        if after <= before:
            raise UsageError(
                "stages-out-of-order",
                stages=list(begins),
                layer=name,
                before=names[before],
                layers=list(names),
            )
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, len(names)])]


def by_parameters(layers: Layers) -> list[float]:
    """Return the number of parameters of each layer. It is equal on all ranks, but a poor estimate
    of time if layers without parameters take long.
    """
    each = (stage_module(layers, range(number, number + 1)) for number in range(len(layers)))
    return [float(sum(parameter.numel() for parameter in module.parameters())) for module in each]


def by_time(
    layers: Layers, arguments: Sequence[Any], group: Group, repeats: int = 5
) -> list[float]:
    """Return the seconds of each layer's forward and backward on one micro-batch (the model's
    positional arguments): the median of `repeats`.

    The group's first rank measures copies of the layers, one at a time, so that no gradient, buffer
    or random stream changes. It broadcasts the result, because all ranks must cut at the same
    places. Collective. Raises TaskError for a layer that does not return one tensor.
    """
    found = torch.zeros(len(layers), dtype=torch.float64)
    problem: Exception | None = None
    if group.rank == 0:
        try:
            with randomness.preserved(devices=True):
                found = torch.tensor(_timed(layers, tuple(arguments), repeats), dtype=torch.float64)
        except Exception as error:
            problem = error
            found.fill_(float("nan"))
    group.host.broadcast(found, place="for the times of layers").wait()
    if problem is not None:
        raise problem
    if found.isnan().any():
        raise PeerFailed("pipeline-rank-failed", rank=0, problem="it could not time the layers")
    return [float(seconds) for seconds in found]


def _timed(layers: Layers, arguments: tuple[Any, ...], repeats: int) -> list[float]:
    seconds = []
    device = next((argument.device for argument in arguments if isinstance(argument, Tensor)), None)
    for number in range(len(layers)):
        # the model is still on the CPU
        layer = copy.deepcopy(stage_module(layers, range(number, number + 1))).train().to(device)
        times = []
        for _ in range(repeats):
            begin = _now(arguments)
            with torch.enable_grad():
                output = layer(
                    *(
                        each.clone() if isinstance(each, Tensor) and each.requires_grad else each
                        for each in arguments
                    )
                )  # clones, because a layer may work in place
                tensor = (
                    output
                    if number + 1 == len(layers)
                    else check_tensor(output, layers.names[number], layers.class_of(number))
                )
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.backward(torch.ones_like(tensor))
            times.append(_now(arguments) - begin)
        seconds.append(statistics.median(times))
        if number + 1 < len(layers):
            tensor = tensor.detach()
            arguments = (tensor.requires_grad_() if tensor.is_floating_point() else tensor,)
    return seconds


def _now(arguments: tuple[Any, ...]) -> float:
    if any(isinstance(argument, Tensor) and argument.is_cuda for argument in arguments):
        torch.cuda.synchronize()
    return perf_counter()


def tied(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tied parameter, by its further names:
    {"head.weight": "bytes.weight"}.
    """
    first: dict[nn.Parameter, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            found[name] = first[parameter]
    return found


def shared(layers: Layers, ranges: Sequence[range]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages use: the numbers of these stages, by the
    parameter's first name. Their gradients must be summed over the stages.
    """
    names = {parameter: name for name, parameter in layers.model.named_parameters()}
    users: dict[str, list[int]] = {}
    for stage, part in enumerate(ranges):
        for parameter in stage_module(layers, part).parameters():
            users.setdefault(names[parameter], []).append(stage)
    return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}


class ModelNames:
    """The names, shapes and dtypes of the tensors of `model`, taken before it is cut."""

    def __init__(self, model: nn.Module) -> None:
        self.forms = forms_of(weights(model).items())
        """Shape and dtype of all tensors, by their names in checkpoints."""
        self.parameters = tuple(name for name, _ in model.named_parameters())
        """The first name of each parameter, in the model's order."""
        self.size = sum(parameter.numel() for parameter in model.parameters())
        """The number of elements of all parameters."""
        self._first = tied(model)

    def first(self, name: str) -> str:
        """Return the first name of a tensor in the model. Its optimizer state has this name."""
        return self._first.get(name, name)

    def in_checkpoints(self, name: str) -> str:
        """Return the name of the tensor in checkpoints (`identity.weights`)."""
        first = self.first(name)
        return min([first, *(other for other, its in self._first.items() if its == first)])

    def find(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of a part of the model, by their names there and first names."""
        found = dict(module.named_parameters(remove_duplicate=False))
        return {self.first(name): parameter for name, parameter in found.items()} | found


class TiedStages:
    """The parameters that several stages share. `ranks`: the ranks of the pipeline that use such a
    parameter, by its first name. `module` holds this rank's parameters.
    """

    def __init__(
        self,
        ranks: Mapping[str, tuple[int, ...]],
        names: ModelNames,
        module: nn.Module,
        pipeline: Group,
        device: torch.device,
    ) -> None:
        self._ranks, self._names, self._pipeline, self._device = ranks, names, pipeline, device
        here = names.find(module) if ranks else {}
        self._here = {
            name: here.get(name) if pipeline.rank in users else None
            for name, users in ranks.items()
        }

    def is_first(self, name: str) -> bool:
        """Whether no earlier rank of the pipeline holds the same parameter."""
        ranks = self._ranks.get(self._names.first(name))
        return ranks is None or self._pipeline.rank == ranks[0]

    def sum_gradients(self) -> None:
        """Sum the gradient of each shared parameter over the stages that use it. Ranks without the
        parameter add zeros. Collective.
        """
        for name, parameter in self._here.items():
            self._sum(name, parameter)

    def _sum(self, name: str, parameter: nn.Parameter | None) -> None:
        gradient = None if parameter is None else parameter.grad
        told = [0 if parameter is None else parameter.numel(), int(gradient is not None)]
        size = torch.tensor(told, dtype=torch.int64, device=self._device)
        self._pipeline.all_reduce(size, "max", place=f"for the size of {name}").wait()
        count, somebody = (int(each) for each in size.tolist())
        if not somebody:  # a replica without micro-batches
            return
        dtype = self._names.forms[self._names.in_checkpoints(name)][1]
        total = (
            torch.zeros(count, dtype=dtype, device=self._device)
            if gradient is None
            else gradient.reshape(-1).clone()
        )
        self._pipeline.all_reduce(
            total, place=f"for the gradient of {name}, which several stages use"
        ).wait()
        if gradient is not None:
            gradient.copy_(total.view_as(gradient))
        elif parameter is not None:
            parameter.grad = total.view_as(parameter)
