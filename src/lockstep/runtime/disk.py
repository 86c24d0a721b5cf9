"""Files and folders that are there whole or not at all, whenever their writer is killed.

Protocols on disk (checkpoints, the claim of a run directory) use methods of their Path, and these
functions for what a Path lacks. Each looks at the kind of path that it is given: the simulator of
tests/simulation registers its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from functools import singledispatch
from pathlib import Path
from typing import IO, Any


def write_whole(file: Path, text: str, *, forced: bool = False) -> None:
    """Write `file` under another name beside it and rename it: readers find all of it, or what was
    there before. `forced`: it is on the disk when this returns.
    """
    new = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    try:
        new.write_text(text, encoding="utf-8")
        if forced:
            force(new)
        new.replace(file)
    except BaseException:
        new.unlink(missing_ok=True)  # on a full disk, above all
        raise
    if forced:
        force(file.parent)


@singledispatch
def force(path: Path) -> None:
    """To the disk: a file's bytes, a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@singledispatch
def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """A folder and all that is in it."""
    shutil.rmtree(path, ignore_errors=ignore_errors)


@singledispatch
def free(folder: Path) -> int:
    """Bytes that can be written on the disk of `folder`."""
    return shutil.disk_usage(folder).free


@singledispatch
def writable(folder: Path) -> bool:
    """Whether files can be made in `folder`: by its permissions, and by how its disk is mounted."""
    return os.access(folder, os.W_OK)


@singledispatch
def lock(file: IO[bytes]) -> None:
    """For as long as it is open, and this process lives. Raises BlockingIOError where another
    has it.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@singledispatch
def status_of(file: IO[Any]) -> os.stat_result:
    """Of the file that was opened, whatever has its name now."""
    return os.fstat(file.fileno())
