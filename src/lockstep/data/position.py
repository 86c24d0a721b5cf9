"""Where a training stands in its data, as a checkpoint keeps it, and whether a state belongs to
the run that is to go on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.knob import whole
from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Position:
    """The first step that is not done."""

    epoch: int
    place: int
    """Its number in its epoch."""


def read_state(
    state: Mapping[str, Any], ours: Mapping[str, Any], digest: Callable[[int], Mapping[str, str]]
) -> tuple[Position, int]:
    """The position and the step's number over all epochs in a Loader's state.

    `ours` is this Loader's fingerprint, `digest` gives a foreign sampler's of an epoch. Raises
    UsageError naming what differs.
    """
    if (
        not isinstance(state, Mapping)
        or not {"epoch", "step_in_epoch", "step", "fingerprint"} <= state.keys()
    ):
        raise UsageError("not-a-loader-state")
    position = Position(
        whole("epoch", state["epoch"], 0),
        whole("step_in_epoch", state["step_in_epoch"], 0),
    )
    step = whole("step", state["step"], position.place)
    walked = position.epoch if position.place else position.epoch - 1
    ours = {**ours, **(digest(walked) if walked >= 0 else {})}
    theirs = state["fingerprint"]
    differing = [
        name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)
    ]
    if differing:
        said = "; ".join(
            f"{name} was {_shown(theirs.get(name))} and is {_shown(ours.get(name))}"
            for name in differing
        )
        raise UsageError("state-of-other-training", difference=said)
    return position, step


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)
