"""The file that predictions are written to: under another name until it is whole. No torch here:
the command checks the name first.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from lockstep.errors import LockstepError, UsageError
from lockstep.runtime.extras import install

SUFFIXES = (".npy", ".parquet")


def check(path: Path) -> Path:
    """The path, if predictions can be written there. Raises UsageError for another extension, a
    folder, or Parquet without pyarrow.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"out={path} ends in {path.suffix or 'nothing'!r}: predictions are written as"
            f" {' or '.join(SUFFIXES)}"
        )
    if path.is_dir():
        raise UsageError(f"out={path} is a folder: give the name of a file in it")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UsageError(
            f"out={path} needs pyarrow, which is not installed: {install('parquet')}, or write .npy"
        )
    return path


class Unfinished:
    """FILE.part, which becomes FILE when it is whole."""

    def __init__(self, path: Path) -> None:
        self.final = path
        self.path = path.with_name(path.name + ".part")

    def create(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
        except OSError as error:
            raise self.failed(error) from None

    def keep(self) -> None:
        """To disk, and under its final name."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self.path.replace(self.final)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def failed(self, error: OSError) -> LockstepError:
        return UsageError(
            f"predictions cannot be written to {self.final} ({error.strerror}): choose another file"
        )
