"""Every rank updates its shard of the parameters, and all exchange what they have updated: ZeRO-1 and 2 (Rajbhandari et al., SC 2020).

The optimizer's work and its state are divided by the number of ranks; the weights are those of the replicated update, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.checkpoints.pieces import Piece
from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.updates.applied import Applied
from lockstep.updates.held import SplitNorm
from lockstep.updates.norm import block_sums, norm_of
from lockstep.updates.replicated import sums_of, whole_pieces
from lockstep.updates.shards import Shards, check_elementwise
from lockstep.updates.state_dict import State, pack, unpack
from lockstep.updates.stepping import Stepping
from lockstep.updates.update import Update, check_belongs


class Sharded(Update):
    """Holds pieces of the parameters in the user's own optimizer, whose groups keep everything else.

    After a step only this rank's slices of the gradients are sums over all ranks, where the reduction can leave the others out.
    """

    name = "sharded"

    def __init__(self, norm: SplitNorm | None = None) -> None:
        """`norm`: where a rank holds a part of the model only."""
        self._split_norm = norm

    def bind(self, reducer: Reducer, optimizer: Optimizer) -> None:
        check_elementwise(type(optimizer))
        check_belongs(reducer, optimizer)
        self._reducer, self._optimizer = reducer, optimizer
        reducer.reduction.scatter()
        self._wholes = [list(group["params"]) for group in optimizer.param_groups]
        self._cut({id(parameter): state for parameter, state in optimizer.state.items()})
        self._stepping = Stepping(optimizer, reducer.parameters[0].device, self._sums, self._norm)

    def follow(self) -> None:
        """Cut again. Groups that were added to the optimizer hold whole parameters. State moves parameter by parameter."""
        self._wholes += [list(group["params"]) for group in self._optimizer.param_groups[len(self._wholes) :]]
        old, frozen = self._shards, self._frozen()
        self._cut(frozen)
        for number, state in old.whole_states(self._optimizer):
            for view in old.mine_of(old.parameters[number]):
                self._optimizer.state.pop(view, None)
            self._give(old.parameters[number], state)

    def _cut(self, states: Mapping[int, State]) -> None:
        """Put this rank's pieces in the place of the optimizer's parameters. `states`, by the identity of whole parameters, are cut as well."""
        reducer = self._reducer
        self._shards = self._made(reducer)
        self._numbers = {id(parameter): number for number, parameter in enumerate(reducer.parameters)}
        for group, wholes in zip(self._optimizer.param_groups, self._wholes, strict=True):
            group["params"] = [
                part for whole in wholes for part in (self._shards.mine_of(whole) if id(whole) in self._numbers else [whole])
            ]
            for whole in wholes:
                self._optimizer.state.pop(whole, None)
                if id(whole) in states:
                    self._give(whole, states[id(whole)])

    def _made(self, reducer: Reducer) -> Shards:
        return Shards(reducer.parameters, reducer.layout, reducer.group)

    def _give(self, whole: Tensor, state: State) -> None:
        """A parameter's state to whoever holds it now: the pieces, or, where it is frozen, itself."""
        if id(whole) in self._numbers:
            self._shards.cut_state(self._optimizer, self._numbers[id(whole)], state)
        else:
            self._optimizer.state[whole] = state

    def _frozen(self) -> dict[int, State]:
        """The state of parameters that were never cut, by their identity."""
        return {id(whole): self._optimizer.state[whole] for wholes in self._wholes for whole in wholes if whole in self._optimizer.state}

    def state_dict(self) -> dict[str, Any]:
        cut = {id(self._shards.parameters[number]): state for number, state in self._shards.whole_states(self._optimizer)}
        return pack(self._optimizer.param_groups, self._wholes, cut | self._frozen())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        options, states = unpack(state, self._wholes)
        for group, option in zip(self._optimizer.param_groups, options, strict=True):
            group.update(option)
        self._optimizer.state.clear()
        self._cut(states)

    def wholes(self) -> Sequence[Sequence[Tensor]]:
        return self._wholes

    def pieces(self, name_of: Callable[[Tensor], str]) -> tuple[list[Piece], list[Piece]]:
        wholes = [each for members in self._wholes for each in members]
        return whole_pieces(self._optimizer, wholes, name_of), list(self._shards.state_pieces(self._optimizer, name_of))

    def overwritten(self) -> Sequence[Tensor]:
        return self._shards.flats

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

    def _norm(self, divisor: float) -> Tensor:
        """The norm over all ranks' slices: the sums of all blocks, in the order in which one rank would have them."""
        if self._split_norm is not None:
            return self._split_norm(
                self._shards.gradients(self._reducer.names), divisor, self._reducer.parameters[0].device, spread=[self._reducer.group]
            )
        return norm_of([self._shards.everybodys([block_sums(each) for each in self._sums()])]) / divisor
