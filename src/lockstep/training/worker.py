"""`python -m lockstep.training.worker RUN`: one rank of `lockstep train`. What to do stands in the run directory's settings.json."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.settings import Settings
from lockstep.training.resolve import resolve
from lockstep.training.run_directory import RunDirectory
from lockstep.training.train import train_as


def main(directory: Path) -> None:
    """Train as `directory`/settings.json says. The task is loaded before the ranks meet: a mistake in it needs no meeting."""
    settings = Settings.read(directory)
    train_as(resolve(settings.task, settings.overrides), settings, RunDirectory.of_launcher(directory))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
