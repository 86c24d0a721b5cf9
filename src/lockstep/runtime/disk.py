"""Files and folders that are complete or absent, whenever their writer is killed.

Protocols on disk (checkpoints, the claim of a run directory) use methods of their Path, and these
functions for what a Path lacks. Each function dispatches on the type of its path: the simulator of
tests/simulation registers its own type.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import singledispatch
from pathlib import Path
from typing import IO, Any

_LONGEST_LINE = 2**20  # bytes


def write_whole(file: Path, text: str, *, forced: bool = False) -> None:
    """Write `file` under another name beside it, then rename it. Readers find all of it, or the
    earlier file. With `forced`, the file is on the disk when this returns.
    """
    new = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    try:
        new.write_text(text, encoding="utf-8")
        if forced:
            force(new)
        new.replace(file)
    except BaseException:
        new.unlink(missing_ok=True)  # mostly: the disk is full
        raise
    if forced:
        force(file.parent)


def write_all(descriptor: int, data: bytes | bytearray) -> None:
    """Write all of `data`: a single write may take only a part, on a disk that becomes full, or if
    another process has made the shared descriptor non-blocking. Raises OSError.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def allocate(descriptor: int, size: int, file: Path) -> None:
    """Give an opened file `size` bytes on its disk, to map them: a write to mapped bytes that the disk
    has no room for would kill this process (SIGBUS). Raises OSError, which names `file`.
    """
    if not hasattr(os, "posix_fallocate"):
        os.ftruncate(descriptor, size)
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def last_lines(file: Path, most: int) -> Iterator[bytes]:
    """Yield the lines in the last `most` bytes of a file, of which the first may be incomplete. A line
    of more than 1 MiB comes in pieces. Yield nothing if there is no regular file that can be read.
    """
    with suppress(OSError):
        if not file.is_file():  # reading a pipe could block for ever
            return
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - most))
            while line := stream.readline(_LONGEST_LINE):
                yield line


@singledispatch
def force(path: Path) -> None:
    """Flush a file's bytes, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@singledispatch
def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder and everything in it."""
    shutil.rmtree(path, ignore_errors=ignore_errors)


@singledispatch
def free(folder: Path) -> int:
    """Return the number of bytes that can still be written on the disk of `folder`."""
    return shutil.disk_usage(folder).free


@singledispatch
def writable(folder: Path) -> bool:
    """Whether files can be created in `folder`, by its permissions and its disk's mount options."""
    return os.access(folder, os.W_OK)


@singledispatch
def lock(file: IO[bytes]) -> None:
    """Lock `file` for as long as it is open and this process lives. Raises BlockingIOError if
    another process holds the lock.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@singledispatch
def status_of(file: IO[Any]) -> os.stat_result:
    """Return the status of the opened file, even if its name now belongs to another file."""
    return os.fstat(file.fileno())


def size_text(size: float) -> str:
    """Return a size as text: 12 bytes, 34.5 KiB, 6.0 MiB, ..."""
    if size < 1024:
        return f"{size:.0f} bytes"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"
