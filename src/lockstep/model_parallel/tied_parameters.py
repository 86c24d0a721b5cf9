"""Parameters under several names, and on several stages of a pipeline: such as an embedding that is
the head too. The names are noted before the model is cut, so that a rank that has some of its
tensors still speaks of them as one process would.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lockstep.checkpoints.identity import weights
from lockstep.collectives.group import Group
from lockstep.model_parallel.split import tied
from lockstep.step.model_shard import forms_of


class ModelNames:
    """Of `model`, which is whole."""

    def __init__(self, model: nn.Module) -> None:
        self.forms = forms_of(weights(model).items())
        """Shape and dtype of all tensors, under the names that checkpoints give them."""
        self.parameters = tuple(name for name, _ in model.named_parameters())
        """Each once, in the model's order."""
        self.size = sum(parameter.numel() for parameter in model.parameters())
        """Numbers in all parameters."""
        self._first = tied(model)

    def first(self, name: str) -> str:
        """Of a tensor's several names the one that comes first in the model, under which its
        optimizer state is known.
        """
        return self._first.get(name, name)

    def in_checkpoints(self, name: str) -> str:
        """The one under which checkpoints know the tensor (`identity.weights`)."""
        first = self.first(name)
        return min([first, *(other for other, its in self._first.items() if its == first)])

    def find(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of a part of the model, also by the first name of each."""
        found = dict(module.named_parameters(remove_duplicate=False))
        return {self.first(name): parameter for name, parameter in found.items()} | found


class TiedStages:
    """`ranks`: of the pipeline, by the first name of each such parameter. `module` holds this
    rank's parameters.
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
        """Whether no earlier rank of the pipeline has the same parameter."""
        ranks = self._ranks.get(self._names.first(name))
        return ranks is None or self._pipeline.rank == ranks[0]

    def sum_gradients(self) -> None:
        """Over all stages that use a parameter. Ranks that have none of it add zeros. A
        collective.
        """
        for name, parameter in self._here.items():
            self._sum(name, parameter)

    def _sum(self, name: str, parameter: nn.Parameter | None) -> None:
        gradient = None if parameter is None else parameter.grad
        told = [0 if parameter is None else parameter.numel(), int(gradient is not None)]
        size = torch.tensor(told, dtype=torch.int64, device=self._device)
        self._pipeline.all_reduce_small(size, "max", place=f"for the size of {name}").wait()
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
