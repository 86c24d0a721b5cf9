"""A task in training under certain settings, to be timed: with a model, an optimizer and a Loader
of its own.

It trains for real, and the model is thrown away. Its schedule is made for a training that is longer
than any trial, and the task's callbacks are not called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.data.loader import ENDLESS
from lockstep.data.windows import Window
from lockstep.step.forward import matmul_precision
from lockstep.training.loop import Training
from lockstep.training.opening import intra_op_threads
from lockstep.world.world import World

_LONG = 10**6  # steps or epochs that schedulers are told


class Trial:
    """One model in training; `step()` takes an optimizer step, its data included, and returns
    the samples of all ranks in it.
    """

    def __init__(self, task: Task, settings: Settings, world: World) -> None:
        length: dict[str, Any] = (
            {"epochs": _LONG} if task.scheduler_per == "epoch" else {"steps": _LONG}
        )
        self.training = Training(
            task, replace(settings, **{"epochs": None, "steps": None, **length}), world, None
        )
        self._threads = settings.threads
        self._windows = self._walk()

    def _walk(self) -> Iterator[Window]:
        for epoch in self.training.loader.epochs(ENDLESS):
            yield from epoch

    def step(self) -> int:
        with intra_op_threads(self._threads), matmul_precision(self.training.precision):
            return sum(self.training.step(next(self._windows)).samples_by_rank)

    def close(self) -> None:
        """End the loader's workers and take the hooks off, so that the memory can go."""
        self.training.loader.close()
        self.training.stepper.reducer.close()
