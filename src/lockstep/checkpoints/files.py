"""A checkpoint on disk: a folder that is there whole or not at all, in formats that run no code when they are read.

    checkpoints/step-0000276/model.safetensors     parameters and buffers
                             state.json            what was trained, how far, and how well
    checkpoints/best.json                          which of the folders has the best metric

A folder is written under another name beside its place, forced to disk and renamed, so a reader never meets half of one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.errors import LockstepError, UsageError

MODEL = "model.safetensors"
STATE = "state.json"
BEST = "best.json"
_NAME = re.compile(r"step-(\d{7,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What `read` found."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return directory / f"step-{step:07d}"


def write(directory: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint after `step` optimizer steps into `directory`, and return its folder. One that is there is replaced.

    `tensors` may lie on any device, in any strides; tensors that share memory are written once each. `state` is JSON.
    Raises LockstepError, with the system's reason, where the disk does not take it; what was there before is then untouched.
    """
    folder = folder_of(directory, step)
    unfinished = directory / f".{folder.name}.{os.getpid()}.unfinished"
    try:
        unfinished.mkdir(parents=True)
        save_file({name: _plain(tensor) for name, tensor in tensors.items()}, unfinished / MODEL)
        (unfinished / STATE).write_text(json.dumps({"step": step, **state}, indent=1) + "\n", encoding="utf-8")
        for path in (unfinished / MODEL, unfinished / STATE, unfinished):
            _force(path)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        _force(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise LockstepError(f"checkpoint {folder} could not be written: {error}") from error
    return folder


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint's folder, its tensors on the CPU. Raises UsageError where it is none, or cannot be read."""
    try:
        state: Any = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return Checkpoint(load_file(folder / MODEL), state)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{folder} is not a checkpoint that can be read: {error}") from None


def written(directory: Path) -> list[Path]:
    """All checkpoints in `directory`, oldest step first."""
    found = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name)] if directory.exists() else []
    return sorted(found, key=_step)


def newest(directory: Path) -> Path | None:
    """The checkpoint of the latest step."""
    return next(reversed(written(directory)), None)


def best(directory: Path) -> Path | None:
    """The checkpoint that was marked as the best; None if none was."""
    file = directory / BEST
    return directory / json.loads(file.read_text(encoding="utf-8"))["checkpoint"] if file.exists() else None


def mark_best(folder: Path, metric: str, value: float) -> None:
    """Note beside `folder` that it is the best, by `metric`."""
    file = folder.parent / BEST
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"checkpoint": folder.name, "metric": metric, "value": value}) + "\n", encoding="utf-8")
    _force(unfinished)
    unfinished.replace(file)
    _force(file.parent)


def keep_only(directory: Path, kept: Collection[Path]) -> None:
    """Remove all checkpoints in `directory` but `kept`."""
    for folder in written(directory):
        if folder not in kept:
            shutil.rmtree(folder)


def _step(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match
    return int(match[1])


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, with memory of its own: what the format can hold."""
    plain = tensor.detach().cpu().contiguous()
    return plain.clone() if plain.data_ptr() == tensor.data_ptr() else plain


def _force(path: Path) -> None:
    """To disk: a file's bytes, a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
