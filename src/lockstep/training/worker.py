"""`python -m lockstep.training.worker RUN [TASK]`: one rank of `lockstep train`. What to do
stands in the run directory's settings.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.config.settings import Settings
from lockstep.launcher.successor import noted
from lockstep.training.resolve import file_of, resolve
from lockstep.training.run_directory import RunDirectory


def main(path: Path, place: str | None = None) -> None:
    """Train as `path`/settings.json says.

    `place` is the task's on this node, where that is another than in the settings. It is loaded
    before the ranks meet, and before the training's own modules: a mistake shows at once.
    """
    settings = Settings.read(path)
    place = place or settings.task
    with noted(file_of(place)):
        task = resolve(place, settings.overrides)
    from lockstep.training.train import train_as

    train_as(task, settings, RunDirectory.of_launcher(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
