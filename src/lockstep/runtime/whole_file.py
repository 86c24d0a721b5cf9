"""A file that is there whole or not at all, whenever its writer is killed."""

from __future__ import annotations

import os
from pathlib import Path


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


def force(path: Path) -> None:
    """To the disk: a file's bytes, a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
