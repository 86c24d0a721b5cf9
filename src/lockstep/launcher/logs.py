"""Where a rank's output goes: the terminal, its own file, or both; and where these files are.

They are in the directory that was asked for, or in one that is kept only if a rank failed.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from lockstep.launcher.console import COLOUR
from lockstep.runtime.environment import COLLECTIVES_FILE
from lockstep.runtime.failure_record import rank_file
from lockstep.runtime.private import new_directory, owner_lives, user_directory

Console = Literal["first", "all", "joined"]
"""Who may write to the terminal. "first": rank 0. "all": every rank, line by line. "joined": every
rank, through the launcher, which joins equal lines.
"""
_REDRAW = re.compile(r"\x1b\[\??\d*[ABCDGHJKhl]|\r(?!\n)")


def redirect(
    rank: int,
    console: Console,
    directory: Path | None,
    *,
    c_to_log: bool = False,
    escaped: bool = False,
) -> None:
    """Set up this rank's stdout and stderr, whole lines at a time, so that ranks do not write into
    each other's lines.

    A rank that may not use the terminal sends everything to `directory`/rank-N.log, including the
    output of libraries written in C. Without a directory that output is dropped. A rank that may
    use the terminal keeps it, and copies Python's output to the file.

    Args:
        c_to_log: send what C writes to stderr to the file and not to the terminal, for libraries
            with verbose logs.
        escaped: print as \\xfc what the locale's encoding lacks. A user's script keeps Python's way.
    """
    whole_lines("backslashreplace" if escaped else None)
    file = Path(os.devnull) if directory is None else rank_file(directory, rank, "log")
    if console == "first" and rank > 0:
        with open(file, "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    elif directory is not None:
        copy = open(file, "a", 1, "utf-8", "backslashreplace")  # noqa: SIM115 - stays open
        if c_to_log:
            sys.stderr.flush()
            encoding = sys.stderr.encoding
            sys.stderr = open(os.dup(2), "w", 1, encoding, "backslashreplace")  # noqa: SIM115 - stays open
            os.dup2(copy.fileno(), 2)
        sys.stdout = cast(TextIO, Tee(sys.stdout, copy))
        sys.stderr = cast(TextIO, Tee(sys.stderr, copy))


def whole_lines(errors: str | None = None) -> None:
    """Make this process print whole lines, each as it ends: ranks share a terminal, a file or a
    notebook's cell. `python -u` would write parts of lines.

    The streams are new ones: those that a fork inherits remember whether the descriptor of the
    server was a file, and `reconfigure` in the user's program would seek in a pipe.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            new: Any = open(  # noqa: SIM115 - stays open
                stream.fileno(), "w", 1, stream.encoding, errors or stream.errors, closefd=False
            )
            new.buffer.raw.name = stream.name
            setattr(sys, name, new)
            if getattr(sys, f"__{name}__") is stream:
                setattr(sys, f"__{name}__", new)


class Tee:
    """A terminal stream whose text is copied to a file. Redraws of a live display stay out of the
    copy, and so do colours.

    `stream` may be replaced for a while by a stream that leads there too. Code that draws on the
    terminal itself may write to `copy`.
    """

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self.stream: Any = stream
        self.copy = copy

    def write(self, text: str) -> int:
        self.stream.write(text)
        if not _REDRAW.search(text):
            with suppress(OSError):  # full disk: the text is on the terminal
                self.copy.write(COLOUR.sub("", text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.stream.flush()
        with suppress(OSError):
            self.copy.flush()

    def __getattr__(self, name: str) -> Any:
        """Take every other attribute from the stream."""
        if name == "stream":  # this object is being created or copied
            raise AttributeError(name)
        return getattr(self.stream, name)


MOST_DIRECTORIES = 10
"""How many directories of failed runs stay; older ones are removed."""
_MARK = "kept"


@dataclass(slots=True)
class LogDirectory:
    """The directory of one run. Set `keep` if a user will want to read its files."""

    path: Path
    keep: bool = False


@contextmanager
def log_directory(path: Path | None) -> Iterator[LogDirectory]:
    """Yield the directory `path`, which stays. Without one yield a new directory of this user's
    own, which stays if `keep` was set.

    Before that, remove what killed launchers left, and the oldest directories that stayed, so that
    ten stay.
    """
    if path is not None:
        yield LogDirectory(path)
        return
    home = user_directory()
    _sweep(home)
    directory = LogDirectory(new_directory(home, "logs"))
    try:
        yield directory
    finally:
        if directory.keep:
            (directory.path / _MARK).touch()
        else:
            shutil.rmtree(directory.path, ignore_errors=True)


def tail(file: Path, lines: int = 15) -> str:
    """Return the last lines of a file, "" if there is none. Reads only the file's end."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - 400 * lines))
            text = opened.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _sweep(home: Path) -> None:
    marked = {}
    for folder in home.glob("logs-*"):
        try:
            marked[folder] = (folder / _MARK).stat().st_mtime
        except FileNotFoundError:  # no mark, or another command has just removed the directory
            if not owner_lives(folder):
                shutil.rmtree(folder, ignore_errors=True)
    newest_first = sorted(marked, key=marked.__getitem__, reverse=True)
    for folder in newest_first[MOST_DIRECTORIES - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)


def switch_debug_on(rank: int, directory: Path) -> None:
    """--debug: make libraries and collectives log what they do in this rank's log file. A variable
    that the user has set stays as it is.

    Call it before torch is imported. It leaves out TORCH_DISTRIBUTED_DEBUG: DETAIL, its useful
    value, crashes torch's DDP over gloo on CPUs (torch 2.13 and 2.14).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "INFO")
    if "NCCL_DEBUG" not in os.environ:
        os.environ["NCCL_DEBUG"] = "INFO"
        os.environ.setdefault("NCCL_DEBUG_FILE", str(rank_file(directory, rank, "nccl.log")))
    os.environ.setdefault(COLLECTIVES_FILE, str(rank_file(directory, rank, "log")))
