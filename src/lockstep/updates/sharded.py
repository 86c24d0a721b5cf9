"""Every rank updates its shard of the parameters, and all exchange what they have updated: ZeRO-1 and 2 (Rajbhandari et al., SC 2020).

The optimizer's work and its state are divided by the number of ranks; the weights are those of the replicated update, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import SharedMemory
from lockstep.updates.norm import block_sums, norm_of
from lockstep.updates.replicated import sums_of
from lockstep.updates.shards import Shards, State, check_elementwise
from lockstep.updates.state_dict import pack, unpack
from lockstep.updates.stepping import Stepping
from lockstep.updates.update import Applied, check_belongs


class Sharded:
    """Holds pieces of the parameters in the user's own optimizer, whose groups keep everything else.

    After a step only this rank's slices of the gradients are sums over all ranks, where the reduction can leave the others out.
    """

    name = "sharded"

    def bind(self, reducer: Reducer, optimizer: Optimizer) -> None:
        check_elementwise(type(optimizer))
        check_belongs(reducer, optimizer)
        self._reducer, self._optimizer = reducer, optimizer
        if isinstance(reducer.reduction, SharedMemory):
            reducer.reduction.scattered = True
        self._wholes = [list(group["params"]) for group in optimizer.param_groups]
        self._cut({id(parameter): state for parameter, state in optimizer.state.items()})
        self._stepping = Stepping(optimizer, reducer.parameters[0].device, self._sums, self._norm)

    def follow(self) -> None:
        """Cut again. Groups that were added to the optimizer hold whole parameters."""
        states = self._states()
        self._wholes += [list(group["params"]) for group in self._optimizer.param_groups[len(self._wholes) :]]
        self._cut(states)

    def _cut(self, states: Mapping[int, State]) -> None:
        """Put this rank's pieces in the place of the optimizer's parameters, with what state these had, by their identity."""
        reducer, optimizer = self._reducer, self._optimizer
        self._shards = Shards(reducer.parameters, reducer.layout, reducer.group)
        numbers = {id(parameter): number for number, parameter in enumerate(reducer.parameters)}
        optimizer.state.clear()
        for group, wholes in zip(optimizer.param_groups, self._wholes, strict=True):
            group["params"] = [part for whole in wholes for part in (self._shards.mine_of(whole) if id(whole) in numbers else [whole])]
            optimizer.state.update({whole: states[id(whole)] for whole in wholes if id(whole) in states and id(whole) not in numbers})
        self._shards.cut_state(optimizer, {numbers[key]: state for key, state in states.items() if key in numbers})

    def _states(self) -> dict[int, State]:
        """The state of whole parameters, by their identity, on all ranks. Frozen ones were never cut."""
        cut = {id(self._shards.parameters[number]): state for number, state in self._shards.whole_state(self._optimizer).items()}
        return cut | {
            id(whole): self._optimizer.state[whole] for wholes in self._wholes for whole in wholes if whole in self._optimizer.state
        }

    def state_dict(self) -> dict[str, Any]:
        return pack(self._optimizer.param_groups, self._wholes, self._states())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        options, states = unpack(state, self._wholes)
        for group, option in zip(self._optimizer.param_groups, options, strict=True):
            group.update(option)
        self._cut(states)

    def apply(self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler | None) -> Applied:
        if scaler is not None and scaler.is_enabled() and self._shards.someone_has_none:
            raise UsageError(
                "a loss scaler looks at every rank's gradients, and this model is too small to give each rank some of them: use update='replicated'"
            )
        self._shards.take_gradients()
        applied = self._stepping.apply(divisor, clip, scaler)
        self._shards.gather()
        return applied

    def _sums(self) -> list[Tensor]:
        return self._shards.slices(sums_of(self._reducer))

    def _norm(self) -> Tensor:
        """The norm over all ranks' slices: the sums of all blocks, in the order in which one rank would have them."""
        return norm_of([self._shards.everybodys([block_sums(each) for each in self._sums()])])
