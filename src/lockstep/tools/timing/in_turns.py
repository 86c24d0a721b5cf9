"""Times several ways to do the same work on the same ranks, in turns: other load on the machine
then affects all of them alike. A Trial provides the step of a task as such a way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.data.windows import ENDLESS, Window
from lockstep.step.forward import matmul_precision
from lockstep.training.loop import Training
from lockstep.training.opening import intra_op_threads
from lockstep.world.world import World

Way = Callable[[], object]
_LONG = 10**6  # steps or epochs: length of the training for which schedulers are made


def take_turns(
    ways: Mapping[str, Way], turns: int, world: World, *, warm_up: int = 3, steady: int = 0
) -> dict[str, list[float]]:
    """Return the seconds of each turn of each way, after `warm_up` untimed turns. All ranks get the
    seconds of the slowest rank.

    All ranks start each turn together, and wait for the GPU at its end. The order of the ways is
    reversed after every turn. Every rank calls it alike. With `steady`, a turn first calls its way
    once, untimed, then times `steady` calls and returns their mean: the first call uses up what
    helpers, such as loader workers, prepared during the other ways' turns.
    """
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, turns):
        for name in names if turn % 2 else reversed(names):
            if steady:
                ways[name]()
            world.group.all_reduce(torch.zeros(1, device=world.device)).wait()
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
    """Wait for the GPU, if the world has one."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def largest(value: float, world: World) -> float:
    """Return the largest of all ranks' values, so that all ranks decide alike."""
    message = torch.tensor(value, dtype=torch.float64)
    world.control.all_reduce(message, "max").wait()
    return message.item()


class Trial:
    """A real training of a task under given settings, with its own model, optimizer and Loader.
    `step()` loads data, takes an optimizer step and returns the number of samples of all ranks.

    The model is discarded. The learning-rate schedule is for a training that is longer than any
    trial. The task's callbacks are not called.
    """

    def __init__(self, task: Task, settings: Settings, world: World) -> None:
        length: dict[str, Any] = (
            {"epochs": _LONG} if task.scheduler_per == "epoch" else {"steps": _LONG}
        )
        self.training = Training(
            task, replace(settings, **{"epochs": None, "steps": None, **length}), world, None
        )
        self._loader, self._threads = self.training.loader, settings.threads
        self._windows = self._walk()

    def _walk(self) -> Iterator[Window]:
        for epoch in self._loader.epochs(ENDLESS):
            yield from epoch

    def step(self) -> int:
        with intra_op_threads(self._threads), matmul_precision(self.training.precision):
            return sum(self.training.step(next(self._windows)).samples_by_rank)

    def close(self) -> None:
        """End the loader's workers and remove the hooks, so that memory can be freed."""
        self._loader.close()
        self.training.stepper.reducer.close()
