"""Whole parameters dealt out to the ranks: each rank updates its own, then all get them from their owners.

For optimizers that must see a whole parameter, or that nobody knows, and for models too small to be cut into slices (updates/shards.py).
The user's optimizer holds the parameters themselves. Their memory stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.checkpoints.plain import decoded, encoded
from lockstep.collectives.group import Group, Work
from lockstep.collectives.texts import everybodys
from lockstep.updates.state_dict import State


class Dealt:
    """Some parameters, each of which one rank of a group owns. Every rank makes it and calls its methods alike."""

    def __init__(self, parameters: Sequence[Tensor], group: Group) -> None:
        self.parameters, self._group = parameters, group
        loads = [0] * group.size
        self._owners = [0] * len(parameters)
        for number in sorted(range(len(parameters)), key=lambda number: -parameters[number].numel()):
            owner = loads.index(min(loads))
            self._owners[number] = owner
            loads[owner] += parameters[number].numel()
        self._owner_of = {id(each): owner for each, owner in zip(parameters, self._owners, strict=True)}

    def mine_of(self, parameter: Tensor) -> list[Tensor]:
        """The parameter, where it is this rank's."""
        return [parameter] if self._owner_of[id(parameter)] == self._group.rank else []

    def take_gradients(self) -> None:
        """The optimizer finds them where they are."""

    def gather(self) -> None:
        """After this rank's parameters were updated: every rank gets everybody's."""
        if self._group.size == 1:
            return
        works: list[tuple[int, list[Tensor], Tensor, Work]] = []
        by_memory: dict[Any, list[Tensor]] = {}
        for parameter, owner in zip(self.parameters, self._owners, strict=True):
            by_memory.setdefault((owner, parameter.dtype, parameter.device), []).append(parameter.detach())
        for (owner, _, _), members in by_memory.items():
            flat = torch.cat([each.reshape(-1) for each in members])
            works.append((owner, members, flat, self._group.broadcast(flat, owner, place="for updated parameters")))
        for owner, members, flat, work in works:
            work.wait()
            if owner != self._group.rank:
                for each, part in zip(members, flat.split([each.numel() for each in members]), strict=True):
                    each.copy_(part.view(each.shape))

    # -- optimizer state -----------------------------------------------------------------------------------------------------------

    def whole_states(self, optimizer: Optimizer) -> Iterator[tuple[int, State]]:
        """The optimizer's state of one parameter after the other, with its number; on all ranks.

        A collective: every rank walks it to its end. Raises UsageError for state that is neither tensors nor plain values.
        """
        mine = {
            number: {name: _described(name, value) for name, value in optimizer.state[parameter].items()}
            for number, parameter in enumerate(self.parameters)
            if self._owners[number] == self._group.rank and parameter in optimizer.state
        }
        said = everybodys(mine, self._group.host, "for what optimizer state there is")
        for number, parameter in enumerate(self.parameters):
            known = said[self._owners[number]].get(str(number))
            if known is not None:
                yield number, {name: self._value(optimizer, number, parameter, name, each) for name, each in known.items()}

    def _value(self, optimizer: Optimizer, number: int, parameter: Tensor, name: str, described: Any) -> Any:
        if described[0] == "plain":
            return decoded(described[1])
        _, dtype, shape, on_cpu = described
        owner = self._owners[number]
        if owner == self._group.rank:
            tensor = optimizer.state[parameter][name].detach().clone()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if on_cpu else parameter.device)
        group = self._group.host if on_cpu else self._group
        group.broadcast(tensor, owner, place=f"for optimizer state {name}").wait()
        return tensor

    def cut_state(self, optimizer: Optimizer, number: int, whole: State) -> None:
        """Give a parameter's owner its state."""
        parameter = self.parameters[number]
        if self._owners[number] == self._group.rank:
            optimizer.state[parameter] = {name: _fitting(value, name, parameter) for name, value in whole.items()}


def _described(name: str, value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type == "cpu"]
    return ["plain", encoded(value, f"the optimizer's state {name}")]


def _fitting(value: Any, name: str, parameter: Tensor) -> Any:
    """As torch's `Optimizer.load_state_dict` has it: on the parameter's device and in its dtype, but for the count of steps."""
    if not isinstance(value, Tensor):
        return value
    if name == "step":
        return value.clone()
    dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
    return value.to(device=parameter.device, dtype=dtype, copy=True)
