"""Times several ways to do the same thing on the same ranks, in turns: what else the machine
does meanwhile falls on all of them alike. The way of a task's step is a Trial's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import torch

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.data.windows import ENDLESS, Window
from lockstep.step.forward import matmul_precision
from lockstep.training.build import loader_of
from lockstep.training.loop import Training
from lockstep.training.opening import intra_op_threads
from lockstep.world.world import World

Way = Callable[[], object]
_LONG = 10**6  # steps or epochs that schedulers are told


def take_turns(
    ways: Mapping[str, Way], turns: int, world: World, *, warm_up: int = 3, steady: int = 0
) -> dict[str, list[float]]:
    """Seconds of every turn of every way, after `warm_up` turns that are not timed; the slowest
    rank's, on all ranks.

    All ranks begin each together, and the order turns round from turn to turn. A GPU's work is
    waited for. Every rank calls it alike. With `steady`, a turn calls its way once, untimed, then
    so many times, and its seconds are those of one: what a way's own helpers, such as loader
    workers, made ready in the others' turns is used up in the first.
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
    """Wait for a GPU's work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def largest(value: float, world: World) -> float:
    """The largest of all ranks' values, so that all decide alike."""
    message = torch.tensor(value, dtype=torch.float64)
    world.control.all_reduce(message, "max").wait()
    return message.item()


class Trial:
    """A task in training under certain settings, with a model, an optimizer and a Loader of its
    own; `step()` takes an optimizer step, its data included, and returns the samples of all ranks
    in it.

    It trains for real, and the model is thrown away. Its schedule is made for a training that is
    longer than any trial, and the task's callbacks are not called.
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

    def beside(self, global_batch: int, threads: int, *, held: int = 0) -> Trial:
        """The same training in steps of so many samples, from a Loader of its own. `held`: it goes
        round in so many windows that are fetched now.
        """
        other, training = copy(self), self.training
        task = replace(training.task, global_batch=global_batch)
        other._loader = loader_of(
            task, training.world, training.settings.loader_workers, drop_last=True
        )
        other._threads, other._windows = threads, other._walk()
        if held:
            windows = list(islice(other._windows, held))
            for window in windows:
                list(window)  # fetched, and kept
            other._windows = cycle(windows)
        return other

    def _walk(self) -> Iterator[Window]:
        for epoch in self._loader.epochs(ENDLESS):
            yield from epoch

    def step(self) -> int:
        with intra_op_threads(self._threads), matmul_precision(self.training.precision):
            return sum(self.training.step(next(self._windows)).samples_by_rank)

    def close(self) -> None:
        """End the loader's workers and take the hooks off, so that the memory can go."""
        self._loader.close()
        self.training.stepper.reducer.close()
