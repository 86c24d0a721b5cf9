"""Which checkpoints of a run are kept: the newest, and beside it the best where a metric decides.

Rank 0 writes, since replicas are equal; the others go on and meet it in the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.identity import sha256, weights
from lockstep.training.run_directory import RunDirectory
from lockstep.training.watch import Watch


class Keeper:
    """Writes the checkpoints of one model. Without a run directory, and on the other ranks, it writes nothing."""

    def __init__(self, model: nn.Module, run: RunDirectory | None, *, writes: bool) -> None:
        weights(model)  # what cannot be stored is found before the training, not after it
        self._model = model
        self._directory = run.checkpoints if run is not None else None
        self._writes = writes and run is not None

    def best(self, watch: Watch, step: int, state: Mapping[str, Any]) -> None:
        """Keep this one as the best so far."""
        folder = self._write(step, state)
        if folder is not None:
            files.mark_best(folder, watch.metric, watch.value)
            folders.keep_only(folder.parent, [folder])

    def newest(self, step: int, state: Mapping[str, Any]) -> Path | None:
        """Keep this one as the newest, beside the best; its folder, on every rank."""
        folder = self._write(step, state)
        if folder is not None:
            best = files.best(folder.parent)
            folders.keep_only(folder.parent, [folder] if best is None else [folder, best])
        return None if self._directory is None else folders.folder_of(self._directory, step)

    def _write(self, step: int, state: Mapping[str, Any]) -> Path | None:
        if not self._writes or self._directory is None:
            return None
        tensors = weights(self._model)
        return files.write(self._directory, step, tensors, {**state, "sha256": sha256(tensors)})
