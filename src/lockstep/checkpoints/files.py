"""A checkpoint on disk: a folder that is complete or absent, in formats that run no code when they
are read.

    checkpoints/step-0000276/model.safetensors             parameters and buffers by their plain
                                                           names: loads anywhere
                             average.safetensors           the averaged model, if there is one, by
                                                           the same names
                             model-00000.safetensors       instead of model.safetensors if no rank
                                                           holds the whole model: a file per rank
                             optimizer-00000.safetensors   the optimizer's state: a file per rank
                                                           that wrote some of it
                             state.json                    what was trained, how far, and how well
                             manifest.json manifest.sha256 what makes it a checkpoint (manifest.py)
    checkpoints/best.json                                  which of the folders has the best metric

A checkpoint is written under another name in the same directory, forced to disk and renamed, so a
reader never sees an incomplete one. Only code that reads or writes tensors imports torch, because
the launcher looks for checkpoints too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoints.folders import BEST, best_name, step_in, written
from lockstep.checkpoints.manifest import (
    AVERAGE,
    MODEL,
    MODEL_PART,
    STATE,
    SealedFile,
    believed,
    check,
    listed,
    measured,
    seal,
)
from lockstep.errors import DamagedCheckpoint
from lockstep.runtime.disk import force, free, remove_tree, size_text, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoints.pieces import StoredTensor, TensorFile
    from lockstep.gradients.saved_state import TensorPiece

# key in the state: the last step after which all replicas were equal; None: not compared
COMPARED = "compared"
# key in the state: the last step after which ranks computed the same as other ranks
WITNESSED = "witnessed"
# key in the state: a transformers model's config.json; None for other models
CONFIG = "config"
_OPTIMIZER = "optimizer-"
_SPARE = 1.1  # free bytes that are needed, as a multiple of a checkpoint's


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all there and unchanged."""

    folder: Path
    entries: Sequence[SealedFile]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that were taken."""
        return int(self.state["step"])

    @property
    def compared(self) -> int | None:
        """The last step after which all replicas were compared, and equal."""
        return self._step(COMPARED)

    @property
    def witnessed(self) -> int | None:
        """The last step after which ranks computed the same as other ranks; None: no witness."""
        return self._step(WITNESSED)

    def _step(self, name: str) -> int | None:
        step = self.state.get(name)
        if step is None:
            return None
        return int(step)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The model's tensors on the CPU, all of them read."""
        from lockstep.checkpoints.pieces import read_all

        return read_all(self.model())

    @property
    def in_parts(self) -> bool:
        """Whether the model is in several files, none of which need have a whole tensor."""
        return any(entry.name.startswith(MODEL_PART) for entry in self.entries)

    def model(self, *, every_name: bool = False) -> dict[str, StoredTensor]:
        """Return the model's tensors, not read yet; `every_name`: tied ones under all names."""
        return self._stored(MODEL_PART if self.in_parts else MODEL, every_name)

    @property
    def averaged(self) -> bool:
        """Whether it holds the average of the model's weights."""
        return any(entry.name == AVERAGE for entry in self.entries)

    def average(self, *, every_name: bool = False) -> dict[str, StoredTensor]:
        """Return the average's tensors by the model's names, not read yet."""
        return self._stored(AVERAGE, every_name)

    def optimizer(self) -> dict[str, StoredTensor]:
        """Return the optimizer's tensors, not read yet: "exp_avg/conv.weight", ..."""
        return self._stored(_OPTIMIZER)

    def _stored(self, prefix: str, every_name: bool = False) -> dict[str, StoredTensor]:
        from lockstep.checkpoints.pieces import stored

        paths = [
            self.folder / entry.name for entry in self.entries if entry.name.startswith(prefix)
        ]
        return stored(paths, every_name=every_name)


def parts(
    model: Mapping[str, Tensor] | Sequence[TensorPiece] | None,
    pieces: Sequence[TensorPiece],
    rank: int,
    average: Mapping[str, Tensor] | None = None,
) -> list[TensorFile]:
    """Return the files that this rank writes: the whole `model`, by name, which one rank has, or
    this rank's pieces of it; the optimizer's `pieces`; and the `average`, which one rank has.

    A tensor that a whole model has under several names is read back under the first.
    """
    from lockstep.checkpoints.pieces import TensorFile

    files = []
    if average is not None:
        files.append(_model_file(AVERAGE, average))
    if isinstance(model, Mapping):
        files.append(_model_file(MODEL, model))
    elif model:
        files.append(TensorFile(f"{MODEL_PART}{rank:05d}.safetensors", model))
    if pieces:
        files.append(TensorFile(f"{_OPTIMIZER}{rank:05d}.safetensors", pieces))
    return files


def _model_file(file: str, model: Mapping[str, Tensor]) -> TensorFile:
    """Return the file of all tensors of a model, each stored under the first of its names."""
    from lockstep.checkpoints.pieces import TensorFile
    from lockstep.gradients.saved_state import TensorPiece

    first_names: dict[int, str] = {}
    pieces = []
    tied = {}
    for name, tensor in model.items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            pieces.append(TensorPiece(name, tensor))
        else:
            tied[name] = first
    return TensorFile(file, pieces, tied)


def write_parts(
    folder: Path, images: Mapping[str, Tensor], pause: Callable[[float], object] | None = None
) -> list[SealedFile]:
    """Write this rank's files, given as bytes by name, into `folder`, which exists. They are on
    disk on return. `pause`: as in `pieces.write`.
    """
    from lockstep.checkpoints.pieces import write

    return [
        SealedFile(name, len(data), write(folder / name, data, pause))
        for name, data in images.items()
    ]


def write_files(folder: Path, files: Sequence[TensorFile]) -> list[SealedFile]:
    """Write these files into `folder`, which exists, as their tensors are now. Raises OSError if
    the disk lacks room for them.
    """
    from lockstep.checkpoints.pieces import image

    images = {file.name: image(file) for file in files}
    check_room(folder, sum(map(len, images.values())))
    return write_parts(folder, images)


def commit(
    folder: Path, path: Path, step: int, entries: Sequence[SealedFile], state: Mapping[str, Any]
) -> Path:
    """Make the checkpoint `path` of the unfinished `folder`, whose parts are all written. Replaces
    what is there.
    """
    write_whole(folder / STATE, json.dumps({"step": step, **state}, indent=1) + "\n", forced=True)
    seal(folder, step, [*entries, measured(folder / STATE)])
    return put_in_place(folder, path)


def put_in_place(folder: Path, path: Path) -> Path:
    """Give a sealed folder its final name, on disk. Removes what had that name."""
    force(folder)
    replaced = folder.with_name(folder.name.replace(".unfinished", ".replaced.unfinished"))
    if path.exists():
        path.rename(replaced)
    folder.rename(path)
    force(path.parent)
    with suppress(PermissionError):  # another user's, which existed before
        force(path.parent.parent)  # the first checkpoint's directory is new itself
    remove_tree(replaced, ignore_errors=True)
    return path


def check_room(folder: Path, needed: int) -> None:
    """Raise OSError if the disk of `folder` lacks room for `needed` bytes and a tenth more."""
    available = free(folder)
    if available < _SPARE * needed:
        raise OSError(
            f"it needs {size_text(_SPARE * needed)}, and {size_text(available)} are free on the disk of"
            f" {folder.parent}: make room, or keep fewer checkpoints"
        )


def read(folder: Path, *, trusted: bool = False) -> Checkpoint:
    """Read a checkpoint; unless it is `trusted`, check every byte of it first. Raises
    DamagedCheckpoint, with the name of the file that is not as it was written.
    """
    entries = listed(folder) if trusted else check(folder)
    file = folder / STATE
    with believed(file):
        state: Any = json.loads(file.read_text(encoding="utf-8"))
        step = int(state["step"])
        if step_in(folder.name) not in (None, step):
            raise DamagedCheckpoint(
                "checkpoint-of-another-step", checkpoint=folder.name, file=STATE, step=step
            )
        return Checkpoint(folder, entries, {**state, "step": step})


def newest_whole(
    directory: Path, until: int | None = None
) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    """Return the latest complete checkpoint, and the errors of the later ones, latest first; of
    all that are not after step `until`, if it is given.
    """
    damaged: list[DamagedCheckpoint] = []
    for folder in reversed(written(directory, until)):
        try:
            return read(folder), damaged
        except DamagedCheckpoint as error:
            damaged.append(error)
    return None, damaged


def best(directory: Path) -> Path | None:
    """Return the checkpoint marked as the best; None if none is, or the mark cannot be read."""
    name = best_name(directory)
    if name is None:
        return None
    return directory / name


def mark_best(folder: Path, metric: str, value: float) -> None:
    """Mark `folder` as the best by `metric`, in a file beside it."""
    file = folder.parent / BEST
    mark = {"checkpoint": folder.name, "metric": metric, "value": value}
    write_whole(file, json.dumps(mark) + "\n", forced=True)
