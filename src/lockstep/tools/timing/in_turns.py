"""Times several ways to do the same thing on the same ranks, in turns: what else the machine
does meanwhile falls on all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from lockstep.world.world import World

Way = Callable[[], object]


def take_turns(
    ways: Mapping[str, Way], turns: int, world: World, *, warm_up: int = 3, steady: int = 0
) -> dict[str, list[float]]:
    """Seconds of every turn of every way, after `warm_up` turns that are not timed; the slowest
    rank's, on all ranks.

    All ranks meet before each, and the order turns round from turn to turn. A GPU's work is waited
    for. Every rank calls it alike. With `steady`, a turn calls its way once, untimed, then so many
    times, and its seconds are those of one: what a way's own helpers, such as loader workers, made
    ready in the others' turns is used up in the first.
    """
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, turns):
        for name in names if turn % 2 else reversed(names):
            world.group.all_reduce(torch.zeros(1, device=world.device)).wait()
            if steady:
                ways[name]()
            settle(world)
            begin = perf_counter()
            for _ in range(steady or 1):
                ways[name]()
            settle(world)
            if turn >= 0:
                seconds[name].append((perf_counter() - begin) / (steady or 1))
    slowest = torch.tensor(
        [seconds[name] for name in names], dtype=torch.float64, device=world.device
    )
    world.group.all_reduce(slowest, "max").wait()
    return dict(zip(names, slowest.tolist(), strict=True))


def settle(world: World) -> None:
    """Wait for a GPU's work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def largest(value: float, world: World) -> float:
    """The largest of all ranks' values, so that all decide alike."""
    message = torch.tensor(value, dtype=torch.float64)
    world.control.all_reduce(message, "max").wait()
    return message.item()
