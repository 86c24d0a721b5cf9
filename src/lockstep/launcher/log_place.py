"""Where the ranks' log files lie: in the directory that was asked for, or in one that is kept only where a rank failed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.launcher.private import new_directory, owner_lives, user_directory

KEPT = 10
"""How many directories of failed runs are kept; older ones are removed."""
_MARK = "kept"


class LogPlace:
    """The directory of one run. Set `keep` where somebody will want to read what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keep = False


@contextmanager
def log_place(asked: Path | None) -> Iterator[LogPlace]:
    """The directory `asked`, which stays; without one a new directory of this user's own, which stays if `keep` was set.

    What launchers that were killed left, and what is older than the ten newest that were kept, is removed first.
    """
    if asked is not None:
        yield LogPlace(asked)
        return
    home = user_directory()
    _sweep(home)
    place = LogPlace(new_directory(home, "logs"))
    try:
        yield place
    finally:
        if place.keep:
            (place.path / _MARK).touch()
        else:
            shutil.rmtree(place.path, ignore_errors=True)


def directory_for_logs(asked: Path | None) -> Path | None:
    """Make the directory that --log names. Raises UsageError where it cannot be."""
    if asked is None:
        return None
    try:
        asked.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log {asked}: no directory can be made there ({error.strerror}); give another") from error
    if not os.access(asked, os.W_OK | os.X_OK):
        raise UsageError(f"--log {asked}: nothing can be written there by this user; give another directory")
    return asked.absolute()


def log_of(directory: Path, rank: int) -> Path:
    """A rank's own file."""
    return directory / f"rank-{rank}.log"


def tail(file: Path, lines: int = 15) -> str:
    """The last lines of a file, "" if there is none; read from its end, however long it is."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - 400 * lines))
            text = opened.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _sweep(home: Path) -> None:
    kept = []
    for old in home.glob("logs-*"):
        if (old / _MARK).exists():
            kept.append(old)
        elif not owner_lives(old):
            shutil.rmtree(old, ignore_errors=True)
    kept.sort(key=_when)
    for old in kept[: max(0, len(kept) - KEPT + 1)]:
        shutil.rmtree(old, ignore_errors=True)


def _when(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
