"""Writing a checkpoint while training goes on: a snapshot is taken at once, and a thread of every
rank writes its part of it.

    this step's end    copy what this rank writes                            the training waits for no more than this
    in the background  write files, force them to disk -> tell all ranks the files, or the error
                       rank 0: state, manifest, rename                       -> tell all ranks how it went

The ranks talk over a group of their own. One save is under way at most; what went wrong with it is
raised at the next call, on all ranks.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.manifest import SealedFile
from lockstep.checkpoints.pieces import TensorPiece, image
from lockstep.collectives.background import Background
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group
from lockstep.errors import LockstepError
from lockstep.runtime.disk import remove_tree

FIRST = 20  # the step after which the first is written, and the cost of one is known
_WRITING = 1 / 8  # of the time, at most, while training continues: its steps hardly notice
_SHARE = 0.02  # of the time may go into saving, where nobody has said how often
_BETWEEN_FAILURES = 3 * 3600.0  # seconds, assumed


class Saver:
    """Saves into one directory. Every rank of `group` (None: there is one) makes it and calls it
    alike; the group is its own.

    `guard` is called before something is made in the directory, and raises LockstepError where it
    must not be.
    """

    def __init__(
        self,
        directory: Path,
        group: Group | None,
        guard: Callable[[], None] = lambda: None,
        pace: Pace | None = None,
    ) -> None:
        self._rank = 0 if group is None else group.rank
        # the ranks that have written wait for the others, with the group's timeout
        most = math.inf if group is None else group.timeout.total_seconds() / 4
        self._pace = pace or Pace(most)
        self._commit = Commit(
            directory=directory,
            rank=self._rank,
            guard=guard,
            everybodys=lambda mine: (
                [mine] if group is None else everybodys(mine, group, "for a checkpoint")
            ),
            aside=_aside,
            pause=self._pace.pause,
        )
        if group is not None and group.memory is not None:
            group.memory.nap()
        self._thread = Background("lockstep checkpoints")
        # of the last snapshot: new memory costs more than the copy
        self._images: dict[str, Tensor] = {}
        self._under_way: Future[tuple[float, str | None]] | None = None
        self.seconds = 0.0
        """Seconds that the last save took in the background, without its pauses."""
        self.complaint: str | None = None
        """Of what was done with the last checkpoint after it was written."""

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor] | Sequence[TensorPiece] | None,
        pieces: Sequence[TensorPiece],
        state: Mapping[str, Any],
        done: Callable[[Path], str | None] = lambda folder: None,
        average: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take a snapshot of this rank's part (rank 0 has the `model` and the `state`, JSON, one
        rank the model's `average`) and have it written.

        Of a model that no rank holds whole, every rank gives what it writes of it.

        `done(folder)` is called on rank 0's thread when the checkpoint is there. What it returns, a
        complaint or None, all ranks then find in `complaint`. Waits for a save that is under way.
        """
        self.wait()
        self._images = images = {
            part.name: image(part, self._images.get(part.name))
            for part in files.parts(model, pieces, self._rank, average)
        }
        self._pace.begin()
        self._under_way = self._thread.submit(lambda: self._write(step, images, dict(state), done))

    def _write(
        self,
        step: int,
        images: Mapping[str, Tensor],
        state: Mapping[str, Any],
        done: Callable[[Path], str | None],
    ) -> tuple[float, str | None]:
        begin = perf_counter()
        complaint = self._commit(step, images, state, done)
        return perf_counter() - begin - self._pace.paused, complaint

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> bool:
        """Return when no save is under way: whether there was one. Raises LockstepError, on all
        ranks, where it failed.
        """
        under_way = self._under_way
        if under_way is None:
            return False
        self._pace.hurry()
        try:
            self.seconds, self.complaint = under_way.result()
        finally:  # after an interrupt it may go on, from memory that the next save is to have
            if under_way.done():
                self._under_way = None
        return True

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._pace.hurry()
        self._thread.close()
        self._images = {}


class Pace:
    """How fast a save writes: with pauses while training continues, without any where training
    waits for it.
    """

    def __init__(self, most: float = math.inf) -> None:
        """`most`: seconds of pauses in one save."""
        self._hurry = threading.Event()
        self._most = most
        self.paused = 0.0
        """Seconds, of this save."""

    def begin(self) -> None:
        """A save begins, and nobody waits for it."""
        self._hurry.clear()
        self.paused = 0.0

    def hurry(self) -> None:
        self._hurry.set()

    def pause(self, worked: float) -> None:
        """After `worked` seconds of writing."""
        begin = perf_counter()
        self._hurry.wait(min(worked * (1 / _WRITING - 1), max(0.0, self._most - self.paused)))
        self.paused += perf_counter() - begin


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """How the ranks write one checkpoint: all of them call it alike, each on a thread of its own."""

    directory: Path
    rank: int
    guard: Callable[[], None]
    everybodys: Callable[[Any], list[Any]]
    """What every rank has to say, as JSON."""
    aside: Callable[[Callable[[], list[SealedFile]]], list[SealedFile]]
    """Does what takes long."""
    pause: Callable[[float], object] | None = None
    """See `pieces.write`."""

    def __call__(
        self,
        step: int,
        images: Mapping[str, Tensor],
        state: Mapping[str, Any],
        done: Callable[[Path], str | None],
    ) -> str | None:
        """The complaint of `done`. Raises LockstepError, on all ranks, where it is not written."""
        folder = folders.unfinished(self.directory, step, self.everybodys(str(os.getpid()))[0])
        entries, error = self._part(folder, images)
        said = self.everybodys({"error": error, "files": [asdict(entry) for entry in entries]})
        failed = {rank: each["error"] for rank, each in enumerate(said) if each["error"]}
        complaint = None
        if not failed and self.rank == 0:
            everything = [SealedFile(**each) for part in said for each in part["files"]]
            try:
                self.guard()
                complaint = done(files.commit(folder, self.directory, step, everything, state))
            except Exception as problem:  # the others wait to hear of it
                failed = {0: self._why(problem)}
        told = self.everybodys({"failed": failed, "complaint": complaint})[0]
        failed = {int(rank): text for rank, text in told["failed"].items()}
        if failed:
            if self.rank == 0:
                remove_tree(folder, ignore_errors=True)
            rank, text = min(failed.items())
            raise LockstepError(
                "checkpoint-not-written",
                checkpoint=str(folders.folder_of(self.directory, step)),
                where="" if len(said) == 1 else f" on rank {rank}",
                reason=text,
            )
        complained: str | None = told["complaint"]
        return complained

    def _part(self, folder: Path, images: Mapping[str, Tensor]) -> tuple[list[SealedFile], str]:
        total = sum(self.everybodys(sum(map(len, images.values()))))
        try:
            self.guard()
            folder.mkdir(parents=True, exist_ok=True)
            files.check_room(folder, total)
            return self.aside(lambda: files.write_parts(folder, images, self.pause)), ""
        except Exception as error:  # as above
            return [], self._why(error)

    def _why(self, error: Exception) -> str:
        """What the guard says now, or else the error: the directory may have gone meanwhile."""
        try:
            self.guard()
        except LockstepError as gone:
            return str(gone)
        return str(error) or type(error).__name__


def _aside(write: Callable[[], list[SealedFile]]) -> list[SealedFile]:
    """On a thread that on Linux is nicer than its process: writing has time. It hardly needs
    Python's lock; one that did would hold up training, which waits for it.
    """
    thread = Background("lockstep checkpoint files")
    if sys.platform == "linux":
        thread.submit(lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19))
    found = thread.submit(write)
    thread.close()
    return found.result()


def steps_until_next(cost: float, step: float) -> int:
    """Steps between two checkpoints, one of which costs `cost` seconds, where a step takes `step`
    seconds.

    sqrt(2 * cost * time between failures) loses least to both saving and repeating (Young, CACM
    1974; Daly, FGCS 2006).
    """
    seconds = max(cost / _SHARE, math.sqrt(2 * cost * _BETWEEN_FAILURES))
    return max(1, math.ceil(seconds / max(step, 1e-6)))
