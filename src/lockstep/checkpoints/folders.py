"""The names of checkpoints in their directory. No torch here: the launcher looks for checkpoints
before any rank starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.runtime.disk import force, remove_tree

BEST = "best.json"  # which of them has the best metric
_ASIDE = "set-aside-"
_NAME = re.compile(r"step-(\d{7,})")
_UNFINISHED = re.compile(
    r"\.(?P<step>step-\d{7,})\..*?(?P<replaced>\.replaced)?\.unfinished|best\.json\..*\.unfinished"
)


def folder_of(directory: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` optimizer steps."""
    return directory / f"step-{step:07d}"


def unfinished(directory: Path, step: int, run: str) -> Path:
    """Return the folder in which a checkpoint is written. `run` tells processes apart."""
    return directory / f".{folder_of(directory, step).name}.{run}.unfinished"


def step_in(name: str) -> int | None:
    """Return the step in a checkpoint's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint's folder."""
    step = step_in(folder.name)
    assert step is not None
    return step


def written(directory: Path) -> list[Path]:
    """Return all checkpoints in `directory`, oldest step first, complete or damaged."""
    found = (
        [path for path in directory.glob("step-*") if step_in(path.name) is not None]
        if directory.exists()
        else []
    )
    return sorted(found, key=step_of)


def found(path: Path) -> list[Path]:
    """Return `path` if it is a checkpoint, else the checkpoints of a run or in a folder, oldest
    step first. Raises UsageError if there is none.
    """
    if (path / "manifest.json").exists():
        return [path]
    inner = path / "checkpoints"
    every = written(inner if inner.is_dir() else path)
    if not every:
        raise UsageError("no-checkpoint", run=path)
    return every


def newest(directory: Path) -> Path | None:
    """Return the checkpoint of the latest step, complete or damaged."""
    return next(reversed(written(directory)), None)


def best_name(directory: Path) -> str | None:
    """Return the name of the checkpoint that is marked as the best; None if none is."""
    file = directory / BEST
    try:
        name = (
            str(json.loads(file.read_text(encoding="utf-8"))["checkpoint"])
            if file.is_file()
            else ""
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return None if step_in(name) is None else name


def keep_only(directory: Path, kept: Collection[Path]) -> None:
    """Remove all checkpoints in `directory` but `kept`."""
    for folder in written(directory):
        if folder not in kept:
            remove_tree(folder)


def tidy(newest: Path, keep: int, compared: int | None, best: Path | None) -> set[Path]:
    """Remove the checkpoints that need not stay, and return those that stay: the `newest`, the last
    `keep`, the `best`, and the last one up to step `compared`, at which replicas were equal.
    """
    found = written(newest.parent)
    good = [each for each in found if compared is not None and step_of(each) <= compared]
    kept = {newest, *found[-keep:], *good[-1:], *([] if best is None else [best])}
    keep_only(newest.parent, kept)
    return kept


def set_aside(directory: Path, after: int) -> None:
    """Rename checkpoints of steps later than `after`, so that nothing finds them: step-0000090
    becomes set-aside-step-0000090.
    """
    for folder in written(directory):
        if step_of(folder) > after:
            aside = directory / f"{_ASIDE}{folder.name}"
            remove_tree(aside, ignore_errors=True)
            with suppress(FileNotFoundError):
                # several parts of a split model may diverge at once: another rank was faster
                folder.rename(aside)
            if best_name(directory) == folder.name:
                (directory / BEST).unlink(missing_ok=True)
    if directory.exists():
        force(directory)


def sweep(directory: Path) -> None:
    """Remove what dead processes have left unfinished; a checkpoint that one was about to replace
    gets its name back. Call this only while nobody writes.
    """
    left = {
        path: match
        for path in (directory.glob("*.unfinished") if directory.exists() else ())
        if (match := _UNFINISHED.fullmatch(path.name))
    }
    if left:
        force(directory)  # else a power failure may bring back old names, for empty folders
    for path, match in left.items():
        if match["replaced"] and not (place := directory / match["step"]).exists():
            path.rename(place)
        elif match["step"]:
            remove_tree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
