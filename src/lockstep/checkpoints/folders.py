"""The names of checkpoints in their directory. No torch here: the launcher looks for checkpoints
before any rank starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.retention import Retention
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


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored: the newest complete checkpoint, and the size of all."""

    step: int
    written_at: float
    """The time of its completion, as of time.time()."""
    bytes: int
    """Bytes of all checkpoints in the directory."""


def by_age(steps: Sequence[int]) -> list[int]:
    """Return which checkpoints of these steps (ascending) stay: the newest two, and as many before
    them that the weights of any step can be computed again from one that is at most half as many
    steps away as the step is old, or from the beginning. Where no such checkpoint was saved, the
    nearest one before it stays.

    by_age([1, 2, 3, 4, 5]) is [2, 4, 5]: step 3 is 1 step from 2, and 2 steps old.
    """
    remaining = list(steps[-2:])
    for index in reversed(range(len(steps) - 2)):
        earlier = steps[index - 1] if index else 0
        farthest = remaining[0] - 1  # of the steps that would be computed again from `earlier`
        if 2 * (farthest - earlier) > steps[-1] - farthest:
            remaining.insert(0, steps[index])
    return remaining


def staying(
    sizes: Mapping[int, int], retention: Retention, newest: int, protected: Collection[int]
) -> set[int]:
    """Return the steps of the checkpoints that stay: what `retention` says, and the `protected`
    ones. None of them is after `newest`, the step that was saved last: a training that has resumed
    before a later checkpoint comes there again.

    Args:
        sizes: the bytes of each checkpoint, by its step.
        retention: the rule.
        newest: the step that was saved last.
        protected: steps of checkpoints that stay in any case.
    """
    steps = sorted(step for step in sizes if step <= newest)
    if retention.count is not None:
        chosen = steps[-retention.count :]
    elif retention.everything:
        chosen = steps
    else:
        chosen = by_age(steps)
    remaining = {newest, *chosen, *protected}
    if retention.most_bytes is not None:
        total = sum(sizes[step] for step in remaining)
        for step in sorted(remaining - {newest, *protected}):
            if total > retention.most_bytes:
                remaining.remove(step)
                total -= sizes[step]
    return remaining


def size_of(folder: Path) -> int:
    """Return the bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def tidy(
    newest: Path, retention: Retention, compared: int | None, best: Path | None
) -> dict[Path, int]:
    """Remove the checkpoints that need not stay. Return those that stay, with their sizes. Besides
    those of `retention` these are the `newest`, the `best`, and the last one up to step `compared`,
    at which replicas were equal.
    """
    folders = {step_of(folder): folder for folder in written(newest.parent)}
    sizes = {step: size_of(folder) for step, folder in folders.items()}
    protected = [step for step in folders if compared is not None and step <= compared][-1:]
    if best is not None and best.exists():
        protected.append(step_of(best))
    steps = staying(sizes, retention, step_of(newest), protected)
    remaining = {folders[step]: sizes[step] for step in sorted(steps)}
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
