"""Writing a checkpoint while training goes on: a snapshot is taken at once, and a thread of every rank writes its part of it.

    this step's end    copy what this rank writes                            the training waits for no more than this
    in the background  write files, force them to disk -> tell all ranks the files, or the error
                       rank 0: state, manifest, rename                       -> tell all ranks how it went

The ranks talk over a group of their own. One save is under way at most; what went wrong with it is raised at the next call, on all ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.manifest import Entry
from lockstep.checkpoints.pieces import Piece
from lockstep.collectives.background import Background
from lockstep.collectives.group import Group
from lockstep.errors import LockstepError


class Saver:
    """Saves into one directory. Every rank of `group` (None: there is one) makes it and calls it alike; the group is its own."""

    def __init__(self, directory: Path, group: Group | None) -> None:
        self._directory = directory
        self._group = group
        self._rank = 0 if group is None else group.rank
        if group is not None and group.memory is not None:
            group.memory.nap()
        self._thread = Background("lockstep checkpoints")
        self._buffers: dict[str, Tensor] = {}  # of the last snapshot: new memory costs more than the copy
        self._under_way: Future[tuple[float, str | None]] | None = None
        self.seconds = 0.0
        """That the last save took in the background."""
        self.complaint: str | None = None
        """Of what was done with the last checkpoint after it was written."""

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor] | None,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        done: Callable[[Path], str | None] = lambda folder: None,
    ) -> None:
        """Take a snapshot of this rank's part (rank 0 has the `model` and the `state`, JSON) and have it written.

        `done(folder)` is called on rank 0's thread when the checkpoint is there. What it returns, a complaint or None, all ranks then find in
        `complaint`. Waits for a save that is under way.
        """
        self.wait()
        copies = {name: self._copied(f"model/{name}", tensor) for name, tensor in (model or {}).items()}
        parts = [Piece(each.name, self._copied(each.key, each.data), each.start, each.shape, each.strides) for each in pieces]
        part = copies if model is not None else None
        self._under_way = self._thread.submit(lambda: self._write(step, part, parts, dict(state), done))

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> bool:
        """Return when no save is under way: whether there was one. Raises LockstepError, on all ranks, where it failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self.seconds, self.complaint = under_way.result()
        return under_way is not None

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._thread.close()

    def _copied(self, key: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffer.copy_(tensor.detach())

    # -- on the thread ---------------------------------------------------------------------------------------------------------------

    def _write(
        self,
        step: int,
        model: Mapping[str, Tensor] | None,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        done: Callable[[Path], str | None],
    ) -> tuple[float, str | None]:
        _yield_to_training()
        begin = perf_counter()
        folder = folders.unfinished(self._directory, step, self._everybodys(str(os.getpid()))[0])
        entries, error = self._part(folder, model, pieces)
        said = self._everybodys({"error": error, "files": [asdict(entry) for entry in entries]})
        failed = {rank: each["error"] for rank, each in enumerate(said) if each["error"]}
        complaint = None
        if not failed and self._rank == 0:
            everything = [Entry(**each) for part in said for each in part["files"]]
            try:
                complaint = done(files.commit(folder, self._directory, step, everything, state))
            except OSError as problem:
                failed = {0: str(problem)}
        told = self._everybodys({"failed": failed, "complaint": complaint})[0]
        failed = {int(rank): text for rank, text in told["failed"].items()}
        if failed:
            if self._rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            rank, text = min(failed.items())
            on = "" if self._group is None else f" on rank {rank}"
            raise LockstepError(f"checkpoint {folders.folder_of(self._directory, step)} could not be written{on}: {text}")
        return perf_counter() - begin, told["complaint"]

    def _part(self, folder: Path, model: Mapping[str, Tensor] | None, pieces: Sequence[Piece]) -> tuple[list[Entry], str]:
        needed = sum(tensor.nbytes for tensor in (model or {}).values()) + sum(piece.data.nbytes for piece in pieces)
        total = sum(self._everybodys(needed))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.check_room(folder, total)
            return files.write_part(folder, model, pieces, self._rank), ""
        except (OSError, SafetensorError) as error:
            return [], str(error)

    def _everybodys(self, mine: Any) -> list[Any]:
        """What every rank has to say, as JSON."""
        if self._group is None:
            return [mine]
        text = json.dumps(mine).encode()
        lengths = self._group.all_gather(torch.tensor([len(text)]), "for a checkpoint").tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self._group.all_gather(padded, "for a checkpoint").view(len(lengths), -1)
        return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def _yield_to_training() -> None:
    """Writing has time: on Linux a thread may be nicer than its process."""
    if sys.platform == "linux":
        import threading

        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
