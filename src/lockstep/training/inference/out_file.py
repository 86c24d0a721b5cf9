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
            "not-a-predictions-file",
            path=str(path),
            problem=f"ends in {path.suffix or 'nothing'!r}",
            suffixes=SUFFIXES,
        )
    if path.is_dir():
        raise UsageError(
            "not-a-predictions-file", path=str(path), problem="is a folder", suffixes=SUFFIXES
        )
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UsageError(
            "missing-extra", what=f"out={path}", package="pyarrow", install=install("parquet")
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
            "cannot-write", name="predictions", file=str(self.final), reason=str(error.strerror)
        )
