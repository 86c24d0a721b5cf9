"""Times several ways to do the same work on the same ranks, in turns: other load on the machine
then affects all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

import torch

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.training.loop import Training
from lockstep.world.world import World

Way = Callable[[], object]
_LONG = 10**6  # steps or epochs: length of the training for which schedulers are made


def take_turns(
    ways: Mapping[str, Way], turns: int, world: World, *, warm_up: int = 3
) -> dict[str, list[float]]:
    """Return the seconds of each turn of each way, after `warm_up` untimed turns. All ranks get the
    seconds of the slowest rank.

    All ranks start each turn together, and wait for the GPU at its end. The order of the ways is
    reversed after every turn. Every rank calls it alike.
    """
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, turns):
        for name in names if turn % 2 else reversed(names):
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


def trial(task: Task, settings: Settings, world: World) -> Training:
    """Return a real training of a task under these settings, to be timed and then discarded.

    The learning-rate schedule is for a training that is longer than any trial. The task's callbacks
    are not called.
    """
    per_epoch = task.scheduler_per == "epoch"
    epochs = _LONG if per_epoch else None
    steps = None if per_epoch else _LONG
    return Training(task, replace(settings, epochs=epochs, steps=steps), world, None)
