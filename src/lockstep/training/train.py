"""`lockstep.train`: train a task. It opens a world and a run directory if necessary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.config.documented import takes_fields
from lockstep.config.settings import Config, Settings
from lockstep.config.task import Task
from lockstep.errors import TaskError
from lockstep.training.loop import Training
from lockstep.training.opening import computing, run_directory_for, world_for
from lockstep.training.result import Result
from lockstep.training.run_directory import RunDirectory
from lockstep.training.saving import MoreWorkers
from lockstep.world.world import World


@takes_fields(Config)
def train(
    task: Task,
    config: Config | None = None,
    *,
    run: Path | str | RunDirectory | None = None,
    world: World | None = None,
    **overrides: Any,
) -> Result:
    """Train a task. All ranks of the open world call this. If none is open, it opens a world and
    closes it.

    A run directory that holds an unfinished run is resumed from its newest complete checkpoint. The
    model is evaluated on eval_data after every epoch and at the end. Rank 0 shows progress on
    stderr.

    Example::

        result = lockstep.train(task, run="runs/mine", steps=100, exact=True)
        print(result.metrics, result.sha256)

    Args:
        task: the task to train.
        config: how to train it. Default: Config(). The fields are the options that
            `lockstep train --help-all` lists.
        run: a folder for settings, metrics, checkpoints and result. None: nothing is written.
        world: default: the open one, else one that is opened here.
        overrides: fields of Config by their names, in place of those of `config`:
        <fields>

    Returns:
        The result with the trained model, on every rank. If a mesh splits the model, it has this
        rank's part.

    Raises:
        UsageError: values that cannot work, or a run directory that is in use, cannot be written,
            or holds a finished run.
        TaskError: one of the task's functions returned something that cannot be used.
        Preempted: SIGTERM or SIGUSR1 came to a rank. All ranks have stopped after the same step,
            and have saved if there is a run directory.
    """
    if not isinstance(task, Task):
        raise TaskError("not-a-task", type=type(task).__name__)
    config = (config or Config()).replaced(overrides)
    with world_for(world, config.device) as world:
        settings = Settings.of(config, task=task.name or "task", workers=world.size)
        with run_directory_for(run, settings, world) as directory, computing(settings, world):
            return Training(task, settings, world, directory).run()


def train_as(task: Task, settings: Settings, run: RunDirectory) -> Result | None:
    """Train on a rank whose launcher has made the settings and claimed the run directory. Opens the
    world.

    Returns None if training ended at a checkpoint so that more workers can continue.
    """
    with world_for(None, settings.device) as world, computing(settings, world):
        try:
            return Training(task, settings, world, run).run()
        except MoreWorkers:
            if world.rank == 0:
                run.grow.touch()
            return None
