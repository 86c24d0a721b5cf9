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
    if match:
        return int(match[1])
    return None


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint's folder."""
    step = step_in(folder.name)
    assert step is not None
    return step


def written(directory: Path, until: int | None = None) -> list[Path]:
    """Return all checkpoints in `directory`, oldest step first, complete or damaged; with `until`
    only those that are not after this step.
    """
    if not directory.exists():
        return []
    folders = []
    for path in directory.glob("step-*"):
        step = step_in(path.name)
        if step is not None and (until is None or step <= until):
            folders.append(path)
    return sorted(folders, key=step_of)


def found(path: Path) -> list[Path]:
    """Return `path` if it is a checkpoint, else the checkpoints of a run or in a folder, oldest
    step first. Raises UsageError if there is none.
    """
    if (path / "manifest.json").exists():
        return [path]
    inner = path / "checkpoints"
    folders = written(inner if inner.is_dir() else path)
    if not folders:
        raise UsageError("no-checkpoint", run=path)
    return folders


def newest(directory: Path, until: int | None = None) -> Path | None:
    """Return the checkpoint of the latest step, or of the latest until this step, complete or
    damaged.
    """
    folders = written(directory, until)
    if folders:
        return folders[-1]
    return None


def best_name(directory: Path) -> str | None:
    """Return the name of the checkpoint that is marked as the best; None if none is."""
    file = directory / BEST
    try:
        if not file.is_file():
            return None
        name = str(json.loads(file.read_text(encoding="utf-8"))["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if step_in(name) is None:
        return None
    return name


def keep_only(directory: Path, remaining: Collection[Path]) -> None:
    """Remove all checkpoints in `directory` but the `remaining` ones."""
    for folder in written(directory):
        if folder not in remaining:
            remove_tree(folder)


def tidy(newest: Path, keep: int, compared: int | None, best: Path | None) -> set[Path]:
    """Remove the checkpoints that need not stay, and return those that stay: the `newest`, the last
    `keep`, the `best`, and the last one up to step `compared`, at which replicas were equal.
    """
    folders = written(newest.parent)
    remaining = {newest, *folders[-keep:]}
    if compared is not None:
        good = [folder for folder in folders if step_of(folder) <= compared]
        remaining.update(good[-1:])
    if best is not None:
        remaining.add(best)
    keep_only(newest.parent, remaining)
    return remaining


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
    if not directory.exists():
        return
    leftovers = {}
    for path in directory.glob("*.unfinished"):
        if match := _UNFINISHED.fullmatch(path.name):
            leftovers[path] = match
    if leftovers:
        force(directory)  # else a power failure may bring back old names, for empty folders
    for path, match in leftovers.items():
        if not match["step"]:
            path.unlink(missing_ok=True)
            continue
        final = directory / match["step"]
        if match["replaced"] and not final.exists():
            path.rename(final)
        else:
            remove_tree(path, ignore_errors=True)
