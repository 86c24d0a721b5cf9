"""Two trials taking turns on the same ranks: step by step, or, where their Loaders have different workers, several steps at a time."""

from __future__ import annotations

from time import perf_counter

import torch

from lockstep.measure.turns import settle, take_turns
from lockstep.tuning.trial import Trial
from lockstep.world import World

FEWEST = 3  # turns
WARM_UP = 2  # turns: the buckets follow the first backward, and the replicas are compared after steps 1 and 2
STEADY = 3  # timed steps of a turn in which loader workers are compared

Times = tuple[list[float], list[float]]


def turns_by_step(base: Trial, candidate: Trial, turns: int, world: World) -> Times:
    """A step a turn."""
    found = take_turns({"base": base.step, "candidate": candidate.step}, turns, world, warm_up=WARM_UP)
    return found["base"], found["candidate"]


def steady_turns(base: Trial, candidate: Trial, turns: int, world: World) -> Times:
    """Several steps a turn, and the first of them not timed.

    Loader workers fetch ahead: in the other trial's turn, at its cost and for nothing. In the first step these batches are used up, and from
    the second on as much is loaded as is consumed.
    """
    ways = {"base": _Steady(base, world), "candidate": _Steady(candidate, world)}
    take_turns(ways, turns, world, warm_up=WARM_UP)
    seconds = torch.tensor([ways[name].seconds[WARM_UP:] for name in ("base", "candidate")], dtype=torch.float64)
    world.control.all_reduce(seconds, "max").wait()
    ours, theirs = seconds.tolist()
    return ours, theirs


class _Steady:
    """One turn; `seconds` a step, of every turn on this rank."""

    def __init__(self, trial: Trial, world: World) -> None:
        self._trial, self._world = trial, world
        self.seconds: list[float] = []

    def __call__(self) -> None:
        self._trial.step()
        settle(self._world)
        began = perf_counter()
        for _ in range(STEADY):
            self._trial.step()
        settle(self._world)
        self.seconds.append((perf_counter() - began) / STEADY)


def largest(value: float, world: World) -> float:
    """The largest of all ranks' values, so that all decide alike."""
    message = torch.tensor(value, dtype=torch.float64)
    world.control.all_reduce(message, "max").wait()
    return message.item()
