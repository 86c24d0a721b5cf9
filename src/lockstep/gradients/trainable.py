"""Which parameters of a model are trained, and whether that has changed since it was last asked."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

Named = list[tuple[str, nn.Parameter]]


class Trainable:
    """The parameters of a module that require gradients, each once, without the ignored ones (full names)."""

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self.module = module
        self._ignored = frozenset(ignored)
        self._seen = self._look()

    def named(self) -> Named:
        return [
            (name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad and name not in self._ignored
        ]

    def changed(self) -> bool:
        """Whether a parameter was added, removed, replaced, frozen, unfrozen or given another dtype or device since this was last asked."""
        now = self._look()
        before, self._seen = self._seen, now
        return now != before

    def _look(self) -> list[tuple[int, bool, torch.dtype, torch.device] | int]:
        """Every parameter's identity, requires_grad and kind, in the order of the tree. A walk without names: it is made every step."""
        seen: list[tuple[int, bool, torch.dtype, torch.device] | int] = []
        stack = [self.module]
        while stack:
            module = stack.pop()
            seen += [
                (id(parameter), parameter.requires_grad, parameter.dtype, parameter.device)
                for parameter in module._parameters.values()
                if parameter is not None
            ]
            seen.append(len(module._modules))
            stack += [child for child in module._modules.values() if child is not None]
        return seen
