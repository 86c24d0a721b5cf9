"""The names of a whole model's tensors, noted before it is cut: a rank that has some of them
still speaks of them as one process would.
"""

from __future__ import annotations

from torch import nn

from lockstep.checkpoints.identity import weights
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
