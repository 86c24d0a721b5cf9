"""A checkpoint of a model alone, written by this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.pieces import image


def write_model(
    directory: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Path:
    """Its folder. Tensors that share memory are written once each."""
    folder = folders.unfinished(directory, step, "alone")
    folder.mkdir(parents=True)
    whole = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    images = {part.name: image(part) for part in files.parts(whole, [], 0)}
    entries = files.write_parts(folder, images)
    return files.commit(folder, folders.folder_of(directory, step), step, entries, state)
