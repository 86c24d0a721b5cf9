"""The parameters of a model that are trained. Their hooks belong to one Reducer at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from operator import attrgetter
from typing import ClassVar
from weakref import ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.collectives.group import Group
from lockstep.errors import UsageError

Named = list[tuple[str, nn.Parameter]]
_KIND = attrgetter("requires_grad", "dtype", "device")


class TrainedParameters:
    """The parameters of a module that require gradients, each once, without the ignored ones
    (given by full names).
    """

    _owners: ClassVar[MutableMapping[Tensor, ref[TrainedParameters]]] = WeakIdKeyDictionary()

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module, self.ignored = module, frozenset(ignored)
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self._taken_over = False
        self._handles: list[RemovableHandle] = []
        # parameters that are equal on all ranks
        self._equal: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
        self._seen = self._look()
        for _, parameter in self.now():
            self._equal[parameter] = None

    def now(self) -> Named:
        """The names and parameters to train, as the module is now."""
        return [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and name not in self.ignored
        ]

    def take(self) -> None:
        """Take charge of the parameters to train now. Two must never reduce the same gradient, so
        a former owner loses its hooks.
        """
        named = self.now()
        if not named:
            raise UsageError("no-trainable-parameter")
        self.close()
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        for parameter in self.parameters:
            owner = self._owners.get(parameter, lambda: None)()
            if owner is not None and owner is not self:
                owner.close()
                owner._taken_over = True
            self._owners[parameter] = ref(self)

    def call(self, hooks: Sequence[Callable[[Tensor], None]]) -> None:
        """Have autograd call these hooks, one per parameter, when its gradient has landed."""
        self.close()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter, hook in zip(self.parameters, hooks, strict=True)
        ]

    def make_equal(self, group: Group) -> None:
        """Copy rank 0's values of parameters that have joined the training to all ranks."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter not in self._equal:
                group.broadcast(
                    parameter.detach(), place=f"for {name}, which joined the training"
                ).wait()
                self._equal[parameter] = None

    def check_ours(self) -> None:
        """Raise UsageError if another owner has taken charge of these parameters."""
        if self._taken_over:
            raise UsageError("parameters-taken-over")

    def close(self) -> None:
        """Take the hooks off the parameters."""
        while self._handles:
            self._handles.pop().remove()

    def changed(self) -> bool:
        """Whether a parameter was added, removed, replaced, frozen, unfrozen or given another
        dtype or device since this was last asked.
        """
        now = self._look()
        before, self._seen = self._seen, now
        return now != before

    def _look(self) -> tuple[list[int], list[object]]:
        """Every parameter's identity and kind (requires_grad, dtype, device), level by level of the
        module tree. It runs in every step, so it needs no names, and no call per module.
        """
        parameters: list[nn.Parameter] = []
        modules = [self._module]
        for module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameters.append(parameter)
            for child in module._modules.values():
                if child is not None:
                    modules.append(child)  # the loop comes to it
        return list(map(id, parameters)), list(map(_KIND, parameters))
