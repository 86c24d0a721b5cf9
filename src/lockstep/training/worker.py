"""`python -m lockstep.training.worker RUN [TASK]`: one rank of `lockstep train`. The run
directory's settings.json says what to train.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.config.settings import Settings
from lockstep.training.resolve import resolve
from lockstep.training.run_directory import RunDirectory


def main(path: Path, task_path: str | None = None) -> None:
    """Train as `path`/settings.json says.

    `task_path`: the task's path on this node, if it differs from the one in the settings. The task
    is loaded before the rendezvous and before the training's own modules, so a mistake shows at
    once.
    """
    settings = Settings.read(path)
    task = resolve(task_path or settings.task, settings.overrides)
    from lockstep.training.train import train_as

    train_as(task, settings, RunDirectory.of_launcher(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
