"""Why a rank ended, as the rank itself records it for its launcher (launcher/failures.py).

A record carries its kind and the monotonic time of its exception: when one rank fails, the others
follow within milliseconds with errors about lost connections.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from traceback import TracebackException, extract_tb
from typing import Literal

from lockstep.errors import (
    CorruptResult,
    ExitCode,
    LoaderWorkerKilled,
    LockstepError,
    PeerFailed,
    UsageError,
)
from lockstep.runtime.disk import write_whole

DIRECTORY = "LOCKSTEP_FAILURES"
"""Environment variable: the directory in which a rank leaves its record."""

Kind = Literal["exception", "usage", "signal", "loader", "stall", "exit", "node", "corrupt"]
"""loader: a signal hit a process that loads data for the rank. stall: the other ranks waited for
it, and the launcher ended it. node: its whole host has gone. corrupt: other ranks have found that
it computes wrong.
"""
Standing = Literal["cause", "timeout", "consequence"]

_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_IN_A_LOADER = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.")
PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH_CALLS = os.path.join(PACKAGE, "launcher", "torch_calls.py")
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|peer closed|socket closed|failed to"
    r" recv|recvValue failed",
    re.I,
)
_TIMED_OUT = re.compile(r"timed out|timeout", re.I)
_STAMP = "_lockstep_monotonic_ns"

_HALF = 20_000  # characters of a text that are shown at its beginning, and at its end


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank ended."""

    rank: int
    kind: Kind
    message: str
    """An exception's type and text. For a usage error or an exit: the text alone."""
    code: int
    """The exit code that the run takes from this failure: 1, 2, n of sys.exit(n), 128 + n for
    signal n.
    """
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    monotonic_ns: int = field(default_factory=time.monotonic_ns)
    """When it happened, on this host's monotonic clock. With several hosts the driver converts it
    to its own clock.
    """
    traceback: str = ""
    """The exception with its frames, except the launcher's; "" if there is none to show."""
    user_line: str = ""
    """For a usage error or sys.exit: file and line in the user's code, if it came from there."""
    standing: Standing = "cause"
    doing: str = ""
    """What it was doing when it was last seen, if that is known: "at step 57, in backward"."""
    note: str = ""
    """What else the launcher knows, as a sentence."""
    log: str = ""
    """The file with this rank's output."""
    tail: str = ""
    """The end of that output, if it was not on the terminal."""

    @property
    def killed(self) -> bool:
        """Whether the cause was a signal or the loss of a node, which may not happen again in
        another try.
        """
        return self.kind in ("signal", "loader", "node")


def rank_file(directory: Path, rank: int, kind: str) -> Path:
    """Return the file of this kind that a rank and its launcher share in `directory`."""
    return directory / f"rank-{rank}.{kind}"


def note_time(error: BaseException) -> int:
    """Return the monotonic time at which `error` was first noted. Call it early where unwinding can
    be slow.
    """
    noted_at = getattr(error, _STAMP, None)
    if noted_at is None:
        noted_at = time.monotonic_ns()
        with suppress(Exception):  # a class may refuse attributes
            setattr(error, _STAMP, noted_at)
    return int(noted_at)


def of_exception(error: BaseException, rank: int, *, may_exit: bool = True) -> Failure:
    """Return the record of an exception that ended this process; this process must write it.

    `may_exit`: the program is the user's own, and may end with sys.exit(0). Otherwise a sys.exit
    has interrupted Lockstep's own work: the run fails, whatever the code.
    """
    monotonic_ns = note_time(error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        code, message = exit_code(error)
        failure = Failure(
            rank=rank, kind="exit", message=message, code=code, monotonic_ns=monotonic_ns
        )
        if isinstance(error, KeyboardInterrupt):
            return failure
        failure = replace(failure, user_line=_user_line(error))
        if may_exit or type(error) is not SystemExit:
            return failure
        return replace(
            failure,
            message=f"sys.exit({'' if error.code is None else repr(error.code)})",
            code=code or ExitCode.FAILED,
            traceback=readable_traceback(error),
        )
    failure = Failure(
        rank=rank,
        kind="exception",
        message=_message(error),
        code=ExitCode.FAILED,
        monotonic_ns=monotonic_ns,
        traceback=readable_traceback(error),
        standing=_standing(error),
    )
    if isinstance(error, UsageError):
        return replace(
            failure,
            kind="usage",
            message=_text(error),
            code=ExitCode.USAGE,
            user_line=_user_line(error),
            standing="cause",
        )
    if isinstance(error, LoaderWorkerKilled):
        return replace(failure, kind="loader", code=128 + error.signal)
    if isinstance(error, CorruptResult) and len(error.ranks) == 1:
        # all ranks raise it, and one of them is corrupt
        standing: Standing = "cause" if rank in error.ranks else "consequence"
        return replace(failure, kind="corrupt", standing=standing)
    return failure


def _text(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except Exception as other:
        return f"(its text is not known: __str__ raised {type(other).__name__})"


def _cut(text: str) -> str:
    """Leave out the middle of a text that is too long to be searched and to be read."""
    left_out = len(text) - 2 * _HALF
    if left_out <= 0:
        return text
    return f"{text[:_HALF]}\n... ({left_out} characters are left out)\n{text[-_HALF:]}"


def _message(error: BaseException) -> str:
    """Return the type and text, as in `ValueError: bad sample`. For an error in a loader worker,
    torch's message is the worker's whole traceback: use its last line.
    """
    text = f"{type(error).__name__}: {_text(error)}".removesuffix(": ")
    caught = _IN_A_LOADER.search(text)
    if caught is None:
        return text
    name, worker = caught.groups()
    lines = [line for line in text.splitlines() if line.startswith(f"{name}: ")]
    return f"{lines[-1]} (in loader worker {worker})" if lines else text


def exit_code(error: SystemExit | KeyboardInterrupt) -> tuple[int, str]:
    """Return the exit code and the text with which Python itself would exit."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "KeyboardInterrupt"
    if error.code is None:
        return ExitCode.OK, ""
    if isinstance(error.code, int):
        return error.code & 0xFF, ""
    return ExitCode.FAILED, str(error.code)


def write(failure: Failure, directory: Path) -> None:
    """Write the record to `directory`, complete or not at all."""
    write_whole(rank_file(directory, failure.rank, "json"), json.dumps(asdict(failure)))


def readable_traceback(error: BaseException) -> str:
    """Return the exception as Python prints it, beginning with the first frame of the user's own
    code.

    An error that Lockstep raises on purpose ends with the last such frame. "" if it has no such
    frame, because the message says all.
    """
    shown = TracebackException.from_exception(error)
    _strip(shown, error, set())
    if not shown.stack and shown.__cause__ is None and isinstance(error, LockstepError):
        return ""
    return _cut("".join(shown.format()))


def _strip(shown: TracebackException, error: BaseException, seen: set[int]) -> None:
    if id(shown) in seen:
        return
    seen.add(id(shown))
    shown.stack[:] = [frame for frame in shown.stack if frame.filename != _TORCH_CALLS]
    files = [frame.filename for frame in shown.stack]
    first = _first_shown(files, not_parsed=hasattr(shown, "offset"))
    if isinstance(error, LockstepError):
        while files and not is_users(files[-1]):
            files.pop()
        del shown.stack[len(files) :]
    del shown.stack[:first]
    links = [(shown.__cause__, error.__cause__), (shown.__context__, error.__context__)]
    if isinstance(error, BaseExceptionGroup):
        links += zip(shown.exceptions or (), error.exceptions, strict=True)
    for linked, linked_error in links:
        if linked is not None and linked_error is not None:
            _strip(linked, linked_error, seen)


def _first_shown(files: Sequence[str], *, not_parsed: bool) -> int:
    """Return the index of the first frame to show: the first of the user's own code.

    `not_parsed`: the error is a SyntaxError, which itself names the file.
    """
    for index, file in enumerate(files):
        if is_users(file):
            return index
    if not_parsed:
        return len(files)
    for index, file in enumerate(files):
        if not _is_ours(file):
            return index
    return 0


def _is_ours(file: str) -> bool:
    return (
        file.startswith(PACKAGE)
        or "runpy" in file
        or file.endswith((f"nn{os.sep}modules{os.sep}module.py", "contextlib.py"))
    )


def is_users(file: str) -> bool:
    """Whether a frame's file is neither this package's, nor an installed package's, nor Python's
    own.
    """
    return (
        not _is_ours(file)
        and "site-packages" not in file
        and not file.startswith(("<", _STANDARD_LIBRARY))
    )


def _user_line(error: BaseException) -> str:
    """Return "file:line" of the innermost frame in the user's code; "" if there is none."""
    frames = [frame for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _standing(error: BaseException) -> Standing:
    text = _text(error)
    if isinstance(error, PeerFailed | ConnectionError) or _PEER_GONE.search(text):
        return "consequence"
    cause = error.__cause__
    if cause is not None and _standing(cause) == "consequence":
        return "consequence"
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "timeout"
    return "timeout" if isinstance(error, RuntimeError) and _TIMED_OUT.search(text) else "cause"
