"""Write a checkpoint while training continues: every rank takes a snapshot at once, and a thread of
its own writes it.

    end of this step   copy what this rank writes: training waits for this only
    in the background  write files, force them to disk -> tell all ranks the files, or the error
                       rank 0: state, manifest, rename -> tell all ranks the outcome

The ranks use a group of their own. At most one save is under way. Its error is raised at the next
call, on all ranks.
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
from lockstep.checkpoints.pieces import TensorFile, image
from lockstep.collectives.background import Background
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group
from lockstep.errors import LockstepError
from lockstep.runtime.disk import remove_tree

FIRST = 20  # the step of the first checkpoint, which shows what one costs
_WRITING = 1 / 8  # most of the time spent writing while training continues: steps hardly slow down
_SHARE = 0.02  # largest share of time for saving, if the user sets no interval
_BETWEEN_FAILURES = 3 * 3600.0  # seconds, assumed


class Saver:
    """Saves into one directory. Every rank of `group` (None: there is one rank) makes a Saver and
    calls it alike. The group is for this Saver only.

    `guard` is called before anything is made in the directory; it raises LockstepError if that is
    not allowed.
    """

    def __init__(
        self,
        directory: Path,
        group: Group | None,
        guard: Callable[[], None] = lambda: None,
        pace: Pace | None = None,
    ) -> None:
        self._rank = 0
        longest_pause = math.inf
        if group is not None:
            self._rank = group.rank
            # a rank that has written waits for the others, at most for the group's timeout
            longest_pause = group.timeout.total_seconds() / 4
            if group.memory is not None:
                group.memory.nap()
        self._pace = pace or Pace(longest_pause)
        self._commit = Commit(
            directory=directory,
            rank=self._rank,
            guard=guard,
            everybodys=lambda value: (
                [value] if group is None else everybodys(value, group, "for a checkpoint")
            ),
            aside=_aside,
            pause=self._pace.pause,
        )
        self._thread = Background("lockstep checkpoints")
        # memory of the last snapshot, used again: new memory costs more than the copy
        self._images: dict[str, Tensor] = {}
        self._under_way: Future[tuple[float, str | None]] | None = None
        self.seconds = 0.0
        """Seconds that the last save took in the background, without its pauses."""
        self.complaint: str | None = None
        """What went wrong with the last checkpoint after it was written, as `done` returned it."""

    def save(
        self,
        step: int,
        parts: Sequence[TensorFile],
        state: Mapping[str, Any],
        done: Callable[[Path], str | None] = lambda folder: None,
    ) -> None:
        """Take a snapshot of this rank's `parts` (`files.parts`) and have it written. Rank 0 gives
        the `state` (JSON).

        `done(folder)` is called on rank 0's thread when the checkpoint is complete. What it
        returns, a complaint or None, is then in `complaint` on all ranks. Waits for a save that is
        under way.
        """
        self.wait()
        self._images = images = {
            part.name: image(part, self._images.get(part.name)) for part in parts
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
        """Wait until no save is under way; return whether there was one. Raises LockstepError on
        all ranks if it failed.
        """
        under_way = self._under_way
        if under_way is None:
            return False
        self._pace.hurry()
        try:
            self.seconds, self.complaint = under_way.result()
        finally:  # after an interrupt the save may still run, and needs its memory
            if under_way.done():
                self._under_way = None
        return True

    def close(self) -> None:
        """End the thread after its current work."""
        self._pace.hurry()
        self._thread.close()
        self._images = {}


class Pace:
    """How fast a save writes: with pauses while training continues, without any if training waits
    for it.
    """

    def __init__(self, most: float = math.inf) -> None:
        """`most`: seconds of pauses in one save, at most."""
        self._hurry = threading.Event()
        self._most = most
        self.paused = 0.0
        """Seconds of pauses in this save."""

    def begin(self) -> None:
        """Start a save that nobody waits for."""
        self._hurry.clear()
        self.paused = 0.0

    def hurry(self) -> None:
        self._hurry.set()

    def pause(self, worked: float) -> None:
        """Pause after `worked` seconds of writing."""
        begin = perf_counter()
        seconds = worked * (1 / _WRITING - 1)
        remaining = max(0.0, self._most - self.paused)
        self._hurry.wait(min(seconds, remaining))
        self.paused += perf_counter() - begin


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """How the ranks write one checkpoint. All ranks call it alike, each on its own thread."""

    directory: Path
    rank: int
    guard: Callable[[], None]
    everybodys: Callable[[Any], list[Any]]
    """Returns one JSON value from every rank."""
    aside: Callable[[Callable[[], list[SealedFile]]], list[SealedFile]]
    """Runs the writing, which takes long."""
    pause: Callable[[float], object] | None = None
    """See `pieces.write`."""

    def __call__(
        self,
        step: int,
        images: Mapping[str, Tensor],
        state: Mapping[str, Any],
        done: Callable[[Path], str | None],
    ) -> str | None:
        """Write the checkpoint and return what `done` returns. Raises LockstepError on all ranks if
        that fails.
        """
        folder = folders.unfinished(self.directory, step, self.everybodys(str(os.getpid()))[0])
        entries, error = self._part(folder, images)
        parts = self.everybodys({"error": error, "files": [asdict(entry) for entry in entries]})
        path = folders.folder_of(self.directory, step)
        failures = [[rank, part["error"]] for rank, part in enumerate(parts) if part["error"]]
        complaint = None
        if not failures and self.rank == 0:
            everything = []
            for part in parts:
                everything += [SealedFile(**entry) for entry in part["files"]]
            try:
                self.guard()
                complaint = done(files.commit(folder, path, step, everything, state))
            except Exception as problem:  # the other ranks wait for the outcome
                failures = [[0, self._reason(problem)]]
        outcome = self.everybodys({"failures": failures, "complaint": complaint})[0]
        if outcome["failures"]:
            if self.rank == 0:
                remove_tree(folder, ignore_errors=True)
            rank, reason = outcome["failures"][0]
            raise LockstepError(
                "checkpoint-not-written",
                checkpoint=str(path),
                where="" if len(parts) == 1 else f" on rank {rank}",
                reason=reason,
            )
        message: str | None = outcome["complaint"]
        return message

    def _part(self, folder: Path, images: Mapping[str, Tensor]) -> tuple[list[SealedFile], str]:
        total = sum(self.everybodys(sum(map(len, images.values()))))
        try:
            self.guard()
            folder.mkdir(parents=True, exist_ok=True)
            files.check_room(folder, total)
            return self.aside(lambda: files.write_parts(folder, images, self.pause)), ""
        except Exception as error:  # as above
            return [], self._reason(error)

    def _reason(self, error: Exception) -> str:
        """Return the guard's error, if it raises now, else `error`: the directory may be gone."""
        try:
            self.guard()
        except LockstepError as gone:
            return str(gone)
        return str(error) or type(error).__name__


def _aside(write: Callable[[], list[SealedFile]]) -> list[SealedFile]:
    """Run `write` on a thread that has a lower priority on Linux, because writing is not urgent.
    It hardly holds Python's lock; a slow thread that held the lock would block training.
    """
    thread = Background("lockstep checkpoint files")
    if sys.platform == "linux":
        thread.submit(lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19))
    future = thread.submit(write)
    thread.close()
    return future.result()


def steps_until_next(cost: float, step: float) -> int:
    """Return the steps between two checkpoints. A checkpoint costs `cost` seconds, a step takes
    `step` seconds.

    sqrt(2 * cost * time between failures) loses least to both saving and repeating (Young, CACM
    1974; Daly, FGCS 2006).
    """
    seconds = max(cost / _SHARE, math.sqrt(2 * cost * _BETWEEN_FAILURES))
    return max(1, math.ceil(seconds / max(step, 1e-6)))
