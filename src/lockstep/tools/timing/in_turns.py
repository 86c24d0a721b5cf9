"""Times several ways to do the same work on the same ranks, in turns: other load on the machine
then affects all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TypeVar

import torch

from lockstep import World

Name = TypeVar("Name")
Way = Callable[[], object]


def take_turns(
    ways: Mapping[Name, Way],
    turns: int,
    world: World,
    *,
    warm_up: int = 3,
    prepare: Callable[[Name], object] = lambda name: None,
) -> dict[Name, list[float]]:
    """Return the seconds of each turn of each way, after `warm_up` untimed turns. All ranks get the
    seconds of the slowest rank.

    All ranks start each turn together, after `prepare`, and wait for the GPU at its end. The order
    of the ways is reversed after every turn. Every rank calls it alike.
    """
    names = list(ways)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, turns):
        for name in names if turn % 2 else reversed(names):
            prepare(name)
            world.group.all_reduce(torch.zeros(1, device=world.device)).wait()
            settle(world)
            begin = perf_counter()
            ways[name]()
            settle(world)
            if turn >= 0:
                seconds[name].append(perf_counter() - begin)
    slowest = torch.tensor(
        [seconds[name] for name in names], dtype=torch.float64, device=world.device
    )
    world.group.all_reduce(slowest, "max").wait()
    return dict(zip(names, slowest.tolist(), strict=True))


def settle(world: World) -> None:
    """Wait for the GPU, if the world has one."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def largest(value: float, world: World) -> float:
    """Return the largest of all ranks' values, so that all ranks decide alike."""
    message = torch.tensor(value, dtype=torch.float64)
    world.control.all_reduce(message, "max").wait()
    return message.item()
