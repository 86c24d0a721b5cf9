"""Ranks that never became ranks: a program that opens no process group is run once by each of them, on the same data and into the same files."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from lockstep import status


def note_groups() -> None:
    """In a rank whose program is over: note whether torch has had a process group here, also one that is closed again.

    `lockstep.init()` notes it itself. torch leaves its own hook for exceptions, the name of the rendezvous, or the open group.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and (
        getattr(sys.excepthook, "__module__", "") == c10d.__name__
        or getattr(c10d, "_default_pg_init_method", None) is not None
        or c10d.is_initialized()
    ):
        status.opened()


def warning(directory: Path, ranks: Iterable[int], size: int) -> str:
    """A sentence where none of `ranks`, which have ended well, has opened a process group; "" also where one has left without a word."""
    views = [status.read(status.file_of(directory, rank)) for rank in ranks]
    alone = all(view is not None and view.phase == "end" and not view.opened for view in views)
    return sentence(size) if alone and size > 1 else ""


def sentence(size: int) -> str:
    return (
        f"warning: the {size} ranks never joined: each ran the whole program by itself, on all of its data. "
        "Call lockstep.init() or torch.distributed.init_process_group() in the program, or start it with --workers 1."
    )
