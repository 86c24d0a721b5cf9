"""Make the training of a run again on this rank, to drive it step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.training.assembled import AssembledTraining
from lockstep.training.opening import computing, matmul_precision, world_for
from lockstep.training.resolve import resolve
from lockstep.world.world import World


def load_task(settings: Settings) -> Task:
    """Load the task of a run. This runs the task's file.

    Args:
        settings: of the run.

    Raises:
        TaskError: the task's file is not there any more, or does not define a task.
    """
    return resolve(settings.task, settings.overrides)


@contextmanager
def rebuilt(
    settings: Settings, task: Task | None = None, world: World | None = None
) -> Iterator[AssembledTraining]:
    """Make the training of these settings on this rank, as `lockstep train` does, without a run
    directory. Every rank of `settings.workers` calls it; one process alone is a world of one.

    Example::

        run = lockstep.runs.read("runs/mine")
        settings = dataclasses.replace(run.settings, workers=1)
        with lockstep.runs.rebuilt(settings) as training:
            training.load(run.path / "checkpoints", 200)
            for window in training.windows():
                print(training.step(window).loss)

    Args:
        settings: of the run, with another number of workers or another device.
        task: the task, if it is loaded already. Default: it is loaded from its file.
        world: the world of this rank. Default: the open one, or a new one on `settings.device`.

    Returns:
        The training, as the value of the `with` statement: its `model`, `optimizer`, `stepper`,
        `loader` and `forward`; `load`, `windows` and `step`.

    Raises:
        UsageError, TaskError: settings or a task that cannot be trained here.
    """
    task = task or load_task(settings)
    with (
        world_for(world, settings.device) as own,
        computing(settings, own),
        matmul_precision(settings.precision or task.precision),
    ):
        training = AssembledTraining(task, settings, own, None)
        try:
            yield training
        finally:
            training.loader.close()
