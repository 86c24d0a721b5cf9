"""Copies of checkpoints at a URL, for hosts that do not come back. Any file system of fsspec works.

A checkpoint is uploaded after it is complete on the local disk, its seal last. Without the seal a
copy is no checkpoint, wherever the upload was interrupted. A download is used only after its
manifest's seal, its files' sizes and their digests were compared.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import fsspec.core

from lockstep.checkpoints import files, manifest
from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.folders import BEST, folder_of, staying, step_in, step_of, unfinished
from lockstep.config.retention import Retention
from lockstep.errors import DamagedCheckpoint, LockstepError, UsageError

_LARGEST_MARK = 4096  # bytes of best.json


class Remote:
    """The folder of checkpoints at `url`. Raises UsageError if its file system cannot be used."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            file_system, root = fsspec.core.url_to_fs(url)
        except Exception as error:
            # each file system raises its own errors: a missing library, credentials, a misspelt
            # protocol
            raise UsageError("unknown-checkpoint-url", url=url, reason=str(error)) from None
        self._fs: Any = file_system
        self._root = str(root).rstrip("/")
        self._best = f"{self._root}/{BEST}"

    def steps(self, until: int | None = None) -> list[int]:
        """Return the steps of the sealed copies, ascending; none after `until`, if it is given.
        Raises LockstepError if the folder cannot be listed.
        """
        self._fs.invalidate_cache()
        with self._translated_errors("cannot be listed"):
            try:
                paths = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        steps = []
        for path in paths:
            step = step_in(Path(path).name)
            if step is None or (until is not None and step > until):
                continue
            if self._fs.exists(self._path(step, manifest.SEAL)):
                steps.append(step)
        return sorted(steps)

    def upload(self, folder: Path) -> None:
        """Copy a complete checkpoint, in place of a copy of the same step. Raises LockstepError;
        copies of other steps stay as they were.
        """
        step = step_of(folder)
        last = [manifest.MANIFEST, manifest.SEAL]
        names = [path.name for path in folder.iterdir() if path.name not in last]
        with self._translated_errors(f"did not accept {folder.name}"):
            self._remove(step)
            self._fs.makedirs(self._path(step), exist_ok=True)
            for name in [*names, *last]:
                self._fs.put_file(str(folder / name), self._path(step, name))

    def mirror(
        self, written: Path, remaining: Mapping[Path, int], best: Path | None, retention: Retention
    ) -> None:
        """Copy the checkpoint that was just `written` and those of `remaining` that have no copy.
        Remove the copies that need not stay by the same rule: there may be more copies than
        checkpoints here, after a host was lost.

        Raises LockstepError if one cannot be copied.
        """
        newest = step_of(written)
        copied = set(self.steps()) - {newest}
        local = {}
        for folder, size in sorted(remaining.items()):
            local[step_of(folder)] = size
            if step_of(folder) not in copied:
                self.upload(folder)
        sizes = dict.fromkeys(copied, remaining[written]) | local  # all are about as large
        stays = staying(sizes, retention, newest, local)
        with self._translated_errors("cannot be tidied"):
            if best is not None:
                self._fs.put_file(str(best.parent / BEST), self._best)
            for step in copied - stays:
                self._remove(step)

    def forget(self, after: int) -> None:
        """Remove copies of steps later than `after`. Raises LockstepError."""
        with self._translated_errors("cannot be tidied"):
            for step in self.steps():
                if step > after:
                    self._remove(step)

    def best(self) -> tuple[int, str, float] | None:
        """Return step, metric and value of the copy that is marked as the best; None if none is, or
        the mark cannot be read.
        """
        try:
            if self._fs.size(self._best) > _LARGEST_MARK:
                return None
            mark = json.loads(self._fs.cat_file(self._best))
            step = step_in(str(mark["checkpoint"]))
            if step is None:
                return None
            return (step, str(mark["metric"]), float(mark["value"]))
        except Exception:  # the mark is only a convenience
            return None

    def fetch(self, step: int, directory: Path) -> Checkpoint:
        """Download a copy into `directory`, as a whole or not at all. Replaces an existing
        checkpoint of that step.

        Raises DamagedCheckpoint if the copy is not as it was written, LockstepError if it cannot be
        read.
        """
        final = folder_of(directory, step)
        folder = unfinished(directory, step, f"{os.getpid()}.fetched")
        folder.mkdir(parents=True)
        try:
            for name in (manifest.SEAL, manifest.MANIFEST):
                self._download(step, name, folder, manifest.LARGEST)
            entries = manifest.listed(folder)
            files.check_room(directory, sum(entry.bytes for entry in entries))
            for entry in entries:
                self._download(step, entry.name, folder, entry.bytes)
            checkpoint = files.read(folder)
            if checkpoint.step != step:
                raise DamagedCheckpoint(
                    "checkpoint-of-another-step",
                    checkpoint=final.name,
                    file=manifest.MANIFEST,
                    step=checkpoint.step,
                )
            return replace(checkpoint, folder=files.put_in_place(folder, final))
        except DamagedCheckpoint as error:
            error.values["checkpoint"] = final.name
            raise error.within(self.url) from None
        except OSError as error:
            raise LockstepError(
                "checkpoint-not-written",
                checkpoint=str(final),
                where=f" from {self.url}",
                reason=str(error),
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def set_aside(self) -> None:
        """Move the copies into before-1, before-2, ... in their folder."""
        steps = self.steps()
        if not steps and self.best() is None:
            return
        with self._translated_errors("cannot be set aside"):
            paths = (f"{self._root}/before-{number}" for number in count(1))
            aside = next(path for path in paths if not self._fs.exists(path))
            self._fs.makedirs(aside, exist_ok=True)
            names = [folder_of(Path(), step).name for step in steps]
            for name in [*names, BEST]:
                path = f"{self._root}/{name}"
                if self._fs.exists(path):
                    self._fs.mv(path, f"{aside}/{name}", recursive=name != BEST)

    def _download(self, step: int, name: str, folder: Path, most: int) -> None:
        """Download one file, if it has at most `most` bytes."""
        checkpoint = folder_of(folder, step).name
        path = self._path(step, name)
        with self._translated_errors(f"did not return {name} of {checkpoint}"):
            try:
                size = self._fs.size(path)
                if size is not None and size > most:
                    raise DamagedCheckpoint(
                        "checkpoint-file-too-large",
                        checkpoint=checkpoint,
                        file=name,
                        size=size,
                        most=most,
                    )
                self._fs.get_file(path, str(folder / name))
            except FileNotFoundError:
                raise DamagedCheckpoint(
                    "checkpoint-file-missing", checkpoint=checkpoint, file=name
                ) from None

    def _remove(self, step: int) -> None:
        """Remove a copy, its seal first: what is left after an error is then no checkpoint."""
        for name in (manifest.SEAL, ""):
            path = self._path(step, name)
            if self._fs.exists(path):
                self._fs.rm(path, recursive=not name)

    def _path(self, step: int, name: str = "") -> str:
        """Return the path of a copy, or of its file `name`."""
        folder = f"{self._root}/{folder_of(Path(), step).name}"
        if name:
            return f"{folder}/{name}"
        return folder

    @contextmanager
    def _translated_errors(self, problem: str) -> Iterator[None]:
        """Raise LockstepError for any error of the file system: each has its own kinds."""
        try:
            yield
        except LockstepError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise LockstepError(
                "checkpoint-copy-failed", url=self.url, what=problem, reason=reason
            ) from error
