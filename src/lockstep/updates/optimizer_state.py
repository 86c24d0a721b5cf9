"""The state of the user's optimizer: all of it on each rank, or only for the rank's own pieces of
the parameters.

Users and checkpoints see the whole state, in the form of torch's `Optimizer.state_dict()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.saved_state import TensorPiece
from lockstep.updates.shards import Shards, State, WholeParameters, check_elementwise

Cut = TypeVar("Cut", bound=Shards | WholeParameters)


class WholeOptimizer:
    """An optimizer that holds the whole state on this rank."""

    def __init__(self, reducer: Reducer, optimizer: Optimizer) -> None:
        check_belongs(reducer, optimizer)
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state in torch's form, on all ranks. Every rank calls it."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state. Every rank calls it with the same state."""
        self._optimizer.load_state_dict(dict(state))

    def wholes(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of every group of the optimizer, whole."""
        return [group["params"] for group in self._optimizer.param_groups]

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[list[TensorPiece], list[TensorPiece]]:
        """The state tensors, named "state/parameter": those that all ranks have, and those that
        only this rank has.
        """
        parameters = list(chain.from_iterable(self.wholes()))
        return whole_pieces(self._optimizer, parameters, name_of), []


class CutOptimizer(Generic[Cut]):
    """An optimizer whose groups hold this rank's pieces of the parameters, and keep all other
    options.

    Args:
        optimizer: an optimizer over whole parameters, which the pieces replace.
        cut: makes the shards, now and for each new layout.
        layout: returns a value that changes when the layout does.
    """

    def __init__(
        self, optimizer: Optimizer, cut: Callable[[], Cut], layout: Callable[[], object]
    ) -> None:
        self._optimizer = optimizer
        self._make = cut
        self._layout = layout
        self._wholes = [list(group["params"]) for group in optimizer.param_groups]
        self._cut({id(parameter): state for parameter, state in optimizer.state.items()})

    def follow(self) -> None:
        """Cut again if the layout is new. Groups that were added to the optimizer hold whole
        parameters. State moves parameter by parameter.
        """
        groups = self._optimizer.param_groups
        if self._layout() == self._current_layout and len(groups) == len(self._wholes):
            return
        added = groups[len(self._wholes) :]
        self._wholes += [list(group["params"]) for group in added]
        old = self.shards
        states: Iterable[tuple[int, State]] = old.whole_states(self._optimizer)
        if isinstance(old, WholeParameters):
            # its pieces are whole parameters, which lose their state below
            states = list(states)
        self._cut(self._frozen())
        for number, state in states:
            parameter = old.parameters[number]
            for view in old.local_pieces(parameter):
                if view is not parameter:
                    self._optimizer.state.pop(view, None)
            self._set_state(parameter, state)

    def _cut(self, states: Mapping[int, State]) -> None:
        """Replace the optimizer's parameters by this rank's pieces. Cut `states`, which are keyed
        by the identity of whole parameters, in the same way.
        """
        self._current_layout = self._layout()
        self.shards = self._make()
        parameters = self.shards.parameters
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        for group, members in zip(self._optimizer.param_groups, self._wholes, strict=True):
            group["params"] = []
            for parameter in members:
                if id(parameter) in self._numbers:
                    group["params"] += self.shards.local_pieces(parameter)
                else:
                    group["params"].append(parameter)
                self._optimizer.state.pop(parameter, None)
                if id(parameter) in states:
                    self._set_state(parameter, states[id(parameter)])

    def _set_state(self, parameter: Tensor, state: State) -> None:
        """Give a parameter's state to its pieces, or to the parameter itself if it is frozen."""
        if id(parameter) in self._numbers:
            self.shards.cut_state(self._optimizer, self._numbers[id(parameter)], state)
        else:
            self._optimizer.state[parameter] = state

    def _frozen(self) -> dict[int, State]:
        """The state of parameters that were never cut, by their identity."""
        states = {}
        for parameter in chain.from_iterable(self._wholes):
            if id(parameter) not in self._numbers and parameter in self._optimizer.state:
                states[id(parameter)] = self._optimizer.state[parameter]
        return states

    def state_dict(self) -> dict[str, Any]:
        parameters = self.shards.parameters
        whole_states = self.shards.whole_states(self._optimizer)
        cut = {id(parameters[number]): state for number, state in whole_states}
        states = cut | self._frozen()
        if cut:
            example = next(iter(cut.values()))
            for parameter in chain.from_iterable(self._wholes):
                if not parameter.numel():  # no rank has a piece of it
                    states[id(parameter)] = _empty(parameter, example)
        return pack(self._optimizer.param_groups, self._wholes, states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        options, states = unpack(state, self._wholes)
        for group, option in zip(self._optimizer.param_groups, options, strict=True):
            group.update(option)
        self._optimizer.state.clear()
        self._cut(states)

    def wholes(self) -> Sequence[Sequence[Tensor]]:
        return self._wholes

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[list[TensorPiece], list[TensorPiece]]:
        assert isinstance(self.shards, Shards)
        parameters = list(chain.from_iterable(self._wholes))
        common = whole_pieces(self._optimizer, parameters, name_of)
        return common, list(self.shards.state_pieces(self._optimizer, name_of))


def _empty(parameter: Tensor, state: State) -> State:
    """Return the state of a parameter without elements, like that of another parameter."""
    empty = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            empty[name] = torch.zeros_like(parameter)
    return empty


OptimizerState = WholeOptimizer | CutOptimizer[Any]
"""What checkpoints and users see of the optimizer."""


def elementwise_pieces(
    reducer: Reducer, optimizer: Optimizer, cut: Callable[[], Cut]
) -> CutOptimizer[Cut]:
    """Return an optimizer that is cut by the reducer's layout. Raises UsageError if it cannot be
    cut.
    """
    check_elementwise(type(optimizer))
    check_belongs(reducer, optimizer)
    return CutOptimizer(optimizer, cut, lambda: reducer.layouts)


def whole_pieces(
    optimizer: Optimizer, parameters: Sequence[Tensor], name_of: Callable[[Tensor], str]
) -> list[TensorPiece]:
    """The tensors of the optimizer's state for these parameters."""
    pieces = []
    for parameter in parameters:
        for state, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                pieces.append(TensorPiece(f"{state}/{name_of(parameter)}", value))
    return pieces


def check_belongs(reducer: Reducer, optimizer: Optimizer) -> None:
    """Raise UsageError if the optimizer trains parameters that are not the reducer's."""
    known = {id(parameter) for parameter in reducer.parameters}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise UsageError(
                    "optimizer-of-another-model", group=number, shape=list(parameter.shape)
                )


def pack(
    groups: Sequence[Mapping[str, Any]],
    parameters: Sequence[Sequence[Tensor]],
    states: Mapping[int, State],
) -> dict[str, Any]:
    """Return the state dict of groups with these options and parameters. `states` is keyed by the
    parameters' identity.
    """
    numbers: dict[int, int] = {}
    packed = []
    for group, members in zip(groups, parameters, strict=True):
        group_numbers = [numbers.setdefault(id(member), len(numbers)) for member in members]
        packed.append({**_options(group), "params": group_numbers})
    return {
        "state": {number: states[key] for key, number in numbers.items() if key in states},
        "param_groups": packed,
    }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def unpack(
    state: Mapping[str, Any], parameters: Sequence[Sequence[Tensor]]
) -> tuple[list[dict[str, Any]], dict[int, State]]:
    """Return the options of every group, and the states by the parameters' identity. Raises
    UsageError for another optimizer's state.
    """
    saved = state["param_groups"]
    saved_counts = [len(group["params"]) for group in saved]
    local_counts = [len(members) for members in parameters]
    if saved_counts != local_counts:
        raise UsageError("optimizer-state-does-not-fit", there=saved_counts, here=local_counts)
    identities: dict[int, int] = {}
    for group, members in zip(saved, parameters, strict=True):
        identities.update(zip(group["params"], map(id, members), strict=True))
    options = [_options(group) for group in saved]
    return options, {identities[number]: value for number, value in state["state"].items()}
