"""`python -m lockstep.training.worker RUN`: one rank of `lockstep train`. What to do stands in the run directory's settings.json."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.settings import Settings
from lockstep.training.resolve import resolve
from lockstep.training.run_directory import RunDirectory


def main(path: Path) -> None:
    """Train as `path`/settings.json says. The task is loaded before the ranks meet, and before the training's own modules: a mistake shows at once."""
    settings = Settings.read(path)
    task = resolve(settings.task, settings.overrides)
    from lockstep.training.train import train_as

    train_as(task, settings, RunDirectory.of_launcher(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
