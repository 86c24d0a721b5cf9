"""An optimizer's state in the form of torch's `Optimizer.state_dict()`, from states that are known by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.errors import UsageError

State = dict[str, Any]


def pack(groups: Sequence[Mapping[str, Any]], parameters: Sequence[Sequence[Tensor]], states: Mapping[int, State]) -> dict[str, Any]:
    """The dict for parameter groups with these options, over these parameters; `states` by the parameters' identity."""
    numbers: dict[int, int] = {}
    packed = []
    for group, members in zip(groups, parameters, strict=True):
        numbers |= {id(parameter): len(numbers) + place for place, parameter in enumerate(members)}
        packed.append(
            {**{name: value for name, value in group.items() if name != "params"}, "params": [numbers[id(each)] for each in members]}
        )
    return {"state": {numbers[key]: states[key] for key in numbers if key in states}, "param_groups": packed}


def unpack(state: Mapping[str, Any], parameters: Sequence[Sequence[Tensor]]) -> tuple[list[dict[str, Any]], dict[int, State]]:
    """The options of every group, and the states by the parameters' identity. Raises UsageError for another optimizer's state."""
    saved = state["param_groups"]
    counts, ours = [len(group["params"]) for group in saved], [len(members) for members in parameters]
    if counts != ours:
        raise UsageError(f"the optimizer's state is another's: its parameter groups hold {counts} parameters, here they hold {ours}")
    known = {
        number: id(each)
        for group, members in zip(saved, parameters, strict=True)
        for number, each in zip(group["params"], members, strict=True)
    }
    options = [{name: value for name, value in group.items() if name != "params"} for group in saved]
    return options, {known[number]: value for number, value in state["state"].items()}
