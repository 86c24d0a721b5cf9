"""Where a rank's output goes: the terminal, its own file, or both."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from lockstep.launcher.forward import connect
from lockstep.launcher.log_place import log_of

Console = Literal["first", "all", "joined"]
"""Who may write to the terminal: rank 0; every rank, line by line; every rank, by way of the launcher, which joins equal lines."""

_REDRAW = re.compile(r"\x1b\[\??\d*[ABCDGHJKhl]|\r(?!\n)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def redirect(rank: int, console: Console, directory: Path | None, *, pipes: Path | None = None, c_to_log: bool = False) -> None:
    """Set up this rank's stdout and stderr, whole lines at a time, so that ranks do not write into each other's lines.

    A rank that may not use the terminal has everything sent to `directory`/rank-N.log, what libraries written in C print included;
    without a directory that output is dropped. A rank that may use it keeps it, and copies Python's output to the file.

    Args:
        pipes: for "joined", where the launcher has made a pipe for each stream of each rank.
        c_to_log: send what C writes to stderr to the file and not to the terminal, for libraries that have been told to be talkative.
    """
    if pipes is not None:
        connect(pipes, rank)
    whole_lines()
    on_console = console != "first" or rank == 0
    if not on_console:
        handle = os.open(os.devnull if directory is None else log_of(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)
    elif directory is not None:
        copy = open(os.open(log_of(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - as long as the process
        if c_to_log:
            sys.stderr.flush()
            sys.stderr = open(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")  # noqa: SIM115 - as above
            os.dup2(copy.fileno(), 2)
        sys.stdout = Tee(sys.stdout, copy)
        sys.stderr = Tee(sys.stderr, copy)


def whole_lines() -> None:
    """Have this process print whole lines, each as it ends: ranks share a terminal, a file or a notebook's cell. `python -u` would write words."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class Tee(io.TextIOBase):
    """A terminal stream whose text is copied to a file. Redraws of a live display stay out of the copy, and so do colours.

    `stream` may be replaced for a while by one that leads there too; `copy` may be written to by whoever draws on the terminal itself.
    """

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self.stream: Any = stream
        self.copy = copy

    def write(self, text: str) -> int:
        self.stream.write(text)
        if not _REDRAW.search(text):
            with suppress(OSError):  # a full disk: the terminal has it
                self.copy.write(_COLOUR.sub("", text))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()
        with suppress(OSError):
            self.copy.flush()

    def __del__(self) -> None:
        """It owns nothing: a stream would be flushed here, which others may have closed."""

    def isatty(self) -> bool:
        return bool(self.stream.isatty())

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in the base class, but never assigned here
        return str(self.stream.encoding)

    @property
    def buffer(self) -> object:
        return self.stream.buffer
