"""Writing a checkpoint while training goes on: a snapshot is taken at once, and a thread of every
rank writes its part of it.

    this step's end    copy what this rank writes                            the training waits for no more than this
    in the background  write files, force them to disk -> tell all ranks the files, or the error
                       rank 0: state, manifest, rename                       -> tell all ranks how it went

The ranks talk over a group of their own. One save is under way at most; what went wrong with it is
raised at the next call, on all ranks.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
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
from lockstep.collectives.texts import everybodys
from lockstep.errors import LockstepError


class Saver:
    """Saves into one directory. Every rank of `group` (None: there is one) makes it and calls it
    alike; the group is its own.

    `guard` is called before something is made in the directory, and raises LockstepError where it
    must not be.
    """

    def __init__(
        self, directory: Path, group: Group | None, guard: Callable[[], None] = lambda: None
    ) -> None:
        self._directory = directory
        self._guard = guard
        self._group = group
        self._rank = 0 if group is None else group.rank
        if group is not None and group.memory is not None:
            group.memory.nap()
        self._thread = Background("lockstep checkpoints")
        # of the last snapshot: new memory costs more than the copy
        self._buffers: dict[str, Tensor] = {}
        self._under_way: Future[tuple[float, str | None]] | None = None
        self.seconds = 0.0
        """That the last save took in the background."""
        self.complaint: str | None = None
        """Of what was done with the last checkpoint after it was written."""

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor] | Sequence[Piece] | None,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        done: Callable[[Path], str | None] = lambda folder: None,
    ) -> None:
        """Take a snapshot of this rank's part (rank 0 has the `model` and the `state`, JSON) and
        have it written.

        Of a model that no rank holds whole, every rank gives what it writes of it.

        `done(folder)` is called on rank 0's thread when the checkpoint is there. What it returns, a
        complaint or None, all ranks then find in `complaint`. Waits for a save that is under way.
        """
        self.wait()
        part: Mapping[str, Tensor] | Sequence[Piece] | None = None
        if isinstance(model, Mapping):
            # one copy of a tensor that has several names
            first = {id(tensor): name for name, tensor in reversed(list(model.items()))}
            copies = {name: self._copied(f"model/{name}", model[name]) for name in first.values()}
            part = {name: copies[first[id(tensor)]] for name, tensor in model.items()}
        elif model is not None:
            part = [
                replace(each, data=self._copied(f"model/{each.key}", each.data)) for each in model
            ]
        parts = [replace(each, data=self._copied(each.key, each.data)) for each in pieces]
        self._under_way = self._thread.submit(
            lambda: self._write(step, part, parts, dict(state), done)
        )

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> bool:
        """Return when no save is under way: whether there was one. Raises LockstepError, on all
        ranks, where it failed.
        """
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

    # -- on the thread ----------------------------------------------------------------------------

    def _write(
        self,
        step: int,
        model: Mapping[str, Tensor] | Sequence[Piece] | None,
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
                self._guard()
                complaint = done(files.commit(folder, self._directory, step, everything, state))
            except (OSError, LockstepError) as problem:
                failed = {0: self._why(problem)}
        told = self._everybodys({"failed": failed, "complaint": complaint})[0]
        failed = {int(rank): text for rank, text in told["failed"].items()}
        if failed:
            if self._rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            rank, text = min(failed.items())
            on = "" if self._group is None else f" on rank {rank}"
            raise LockstepError(
                "checkpoint-not-written",
                checkpoint=str(folders.folder_of(self._directory, step)),
                where=on,
                reason=text,
            )
        return perf_counter() - begin, told["complaint"]

    def _part(
        self,
        folder: Path,
        model: Mapping[str, Tensor] | Sequence[Piece] | None,
        pieces: Sequence[Piece],
    ) -> tuple[list[Entry], str]:
        tensors = (
            list(model.values())
            if isinstance(model, Mapping)
            else [each.data for each in model or ()]
        )
        needed = sum(tensor.nbytes for tensor in [*tensors, *(piece.data for piece in pieces)])
        total = sum(self._everybodys(needed))
        try:
            self._guard()
            folder.mkdir(parents=True, exist_ok=True)
            files.check_room(folder, total)
            return files.write_part(folder, model, pieces, self._rank), ""
        except (OSError, SafetensorError, LockstepError) as error:
            return [], self._why(error)

    def _why(self, error: Exception) -> str:
        """What the guard says now, or else the error: the directory may have gone meanwhile."""
        try:
            self._guard()
        except LockstepError as gone:
            return gone.sentence
        return str(error)

    def _everybodys(self, mine: Any) -> list[Any]:
        """What every rank has to say, as JSON."""
        return [mine] if self._group is None else everybodys(mine, self._group, "for a checkpoint")


def _yield_to_training() -> None:
    """Writing has time: on Linux a thread may be nicer than its process."""
    if sys.platform == "linux":
        import threading

        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
