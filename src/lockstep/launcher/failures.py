"""Why a rank ended, as the rank itself records it, and which of several failures was the cause.

When one rank fails, the others follow within milliseconds with errors about lost connections. So a
record carries its kind and the monotonic time of its exception. Deaths by signal and usage errors
come before exceptions, these before timeouts, and these before complaints about a peer. Within one
class the earliest counts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
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
    WorkerFailed,
    entry_of,
)
from lockstep.runtime.disk import write_whole
from lockstep.runtime.streams import plain

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
    where: str = ""
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


def note_time(error: BaseException) -> int:
    """Return the monotonic time at which `error` was first noted. Call it early where unwinding can
    be slow.
    """
    known = getattr(error, _STAMP, None)
    if isinstance(known, int):
        return known
    now = time.monotonic_ns()
    with suppress(Exception):  # a class may refuse attributes
        setattr(error, _STAMP, now)
    return now


def of_exception(error: BaseException, rank: int, *, may_exit: bool = True) -> Failure:
    """Return the record of an exception that ended this process; this process must write it.

    `may_exit`: the program is the user's own, and may end with sys.exit(0). Otherwise a sys.exit
    has interrupted Lockstep's own work: the run fails, whatever the code.
    """
    record = partial(Failure, rank=rank, monotonic_ns=note_time(error))
    if isinstance(error, UsageError):
        shown, where = readable_traceback(error), _user_line(error)
        return record(
            kind="usage", message=_text(error), code=ExitCode.USAGE, traceback=shown, where=where
        )
    if type(error) is SystemExit and not may_exit:
        return record(
            kind="exit",
            message=f"sys.exit({'' if error.code is None else repr(error.code)})",
            code=exit_code(error)[0] or ExitCode.FAILED,
            traceback=readable_traceback(error),
            where=_user_line(error),
        )
    if isinstance(error, SystemExit | KeyboardInterrupt):
        code, message = exit_code(error)
        return record(
            kind="exit",
            message=message,
            code=code,
            where=_user_line(error) if isinstance(error, SystemExit) else "",
        )
    kind: Kind = "loader" if isinstance(error, LoaderWorkerKilled) else "exception"
    standing = _standing(error)
    if isinstance(error, CorruptResult) and len(error.ranks) == 1:
        # all ranks raise it, and one of them is corrupt
        kind, standing = "corrupt", "cause" if rank in error.ranks else "consequence"
    code = 128 + error.signal if isinstance(error, LoaderWorkerKilled) else ExitCode.FAILED
    return record(
        kind=kind,
        message=_message(error),
        code=code,
        traceback=readable_traceback(error),
        standing=standing,
    )


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
    last = [line for line in text.splitlines() if line.startswith(f"{caught[1]}: ")]
    return f"{last[-1]} (in loader worker {caught[2]})" if last else text


def of_exit(code: int, rank: int, pid: int, *, message: str = "", traceback: str = "") -> Failure:
    """Return the record of a rank that left none, from its exit code. A code below 0 is the signal
    that killed it.
    """
    if code < 0:
        return Failure(
            rank=rank,
            kind="signal",
            message=signal_name(-code),
            code=128 - code,
            pid=pid,
            traceback=traceback,
        )
    return Failure(rank=rank, kind="exit", message=message, code=code, pid=pid, traceback=traceback)


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
    write_whole(directory / f"rank-{failure.rank}.json", json.dumps(asdict(failure)))


def read_all(directory: Path) -> list[Failure]:
    """Return all records in `directory`, sorted by rank."""
    found = [
        Failure(**json.loads(file.read_text(encoding="utf-8")))
        for file in directory.glob("rank-*.json")
    ]
    return sorted(found, key=lambda failure: failure.rank)


def of_ranks(
    directory: Path, codes: Mapping[int, int | None], pids: Mapping[int, int]
) -> list[Failure]:
    """Return the records that ranks left. For a rank that died without one, return what the system
    reports.
    """
    found = {failure.rank: failure for failure in read_all(directory)}
    for rank, code in codes.items():
        if code and rank not in found:
            stack = directory / f"rank-{rank}.stack"
            dump = stack.read_text(errors="replace") if stack.exists() else ""
            found[rank] = of_exit(code, rank, pids[rank], traceback=readable_stack(dump))
    return list(found.values())


def first(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that explains the others; None if there is no failure."""
    return min(failures, key=_precedence, default=None)


def render(failure: Failure) -> str:
    """Return the text for the user: the rank's last output, its traceback, then a line that names
    it. For a usage error: one sentence.
    """
    if failure.kind == "usage":
        return plain(f"error: {failure.message}{f' ({failure.where})' if failure.where else ''}")
    shown = f"the last that rank {failure.rank} printed:\n{failure.tail}" if failure.tail else ""
    lines = [shown, failure.traceback.rstrip(), summary(failure), failure.note]
    return plain("\n".join(line for line in lines if line))


def summary(failure: Failure) -> str:
    """Return one line: which rank, where it ran, what ended it."""
    who = (
        f"rank {failure.rank} (pid {failure.pid},"
        f" {failure.host}{f', log {failure.log}' if failure.log else ''})"
    )
    text, *more = failure.message.strip().splitlines() or [""]
    if more and text.endswith(": ") and text.count(" ") == 1:
        text += more[-1].strip()  # as of torch's spawn, whose text begins with an empty line
    doing = f" {failure.doing}" if failure.doing else ""
    if failure.kind == "node":
        return f"node {failure.host} {text}"
    if failure.kind == "signal":
        hint = (
            "; the system does this when memory runs out"
            if failure.code == 128 + signal.SIGKILL
            else ""
        )
        return f"{who} was killed by {text}{doing}{hint}"
    if failure.kind == "stall":
        return failure.message + (f" Its log: {failure.log}" if failure.log else "")
    if failure.kind == "exit":
        where = f" ({failure.where})" if failure.where else ""
        if failure.traceback:  # sys.exit has interrupted Lockstep's own work
            return f"{who} was ended by {text}{doing}{where}: the other ranks cannot continue without it"
        return f"{who} exited with code {failure.code}{doing}{where}" + (
            f": {text}" if text else ""
        )
    return f"{who} failed{doing}: {text}"


def worker_failed(cause: Failure) -> WorkerFailed:
    """Return the error that `lockstep.launch` raises for `cause`. It keeps the code of the rank's
    own error.
    """
    text = summary(cause) + (f"\n{cause.note}" if cause.note else "")
    text += f"\n\n{cause.traceback.rstrip()}" if cause.traceback else ""
    rank, traceback = cause.rank, cause.traceback
    error = WorkerFailed(text, rank=rank, traceback=traceback)
    return (
        error
        if entry_of(error.code)
        else WorkerFailed("rank-failed", rank=rank, traceback=traceback, text=text)
    )


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


def readable_stack(dump: str) -> str:
    """Return a fatal signal's stack as faulthandler wrote it, without the launcher's frames and the
    list of extension modules.
    """
    lines = dump.partition("\nExtension modules:")[0].splitlines()
    return "\n".join(
        line
        for line in lines
        if not (PACKAGE in line and "launcher" in line) and "<frozen runpy>" not in line
    )


def _strip(shown: TracebackException, error: BaseException, seen: set[int]) -> None:
    if id(shown) in seen:
        return
    seen.add(id(shown))
    shown.stack[:] = [frame for frame in shown.stack if frame.filename != _TORCH_CALLS]
    files = [frame.filename for frame in shown.stack]
    theirs = next((number for number, file in enumerate(files) if is_users(file)), None)
    if theirs is None and hasattr(shown, "offset"):  # a SyntaxError or a subclass
        theirs = len(files)  # the error itself names the file that cannot be parsed
    if theirs is None:
        theirs = next((number for number, file in enumerate(files) if not _is_ours(file)), 0)
    if isinstance(error, LockstepError):
        while files and not is_users(files[-1]):
            files.pop()
        del shown.stack[len(files) :]
    del shown.stack[:theirs]
    links = [(shown.__cause__, error.__cause__), (shown.__context__, error.__context__)]
    if isinstance(error, BaseExceptionGroup):
        links += zip(shown.exceptions or (), error.exceptions, strict=True)
    for linked, its in links:
        if linked is not None and its is not None:
            _strip(linked, its, seen)


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
    theirs = [frame for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def _standing(error: BaseException) -> Standing:
    text, cause = _text(error), error.__cause__
    if isinstance(error, PeerFailed | ConnectionError) or _PEER_GONE.search(text):
        return "consequence"
    if cause is not None and _standing(cause) == "consequence":
        return "consequence"
    timed_out = isinstance(error, RuntimeError) and _TIMED_OUT.search(text)
    return (
        "timeout"
        if timed_out or isinstance(error, TimeoutError) or "Timeout" in type(error).__name__
        else "cause"
    )


def finished_early(failures: Iterable[Failure], finished: Iterable[int]) -> str:
    """Return the note for a cause that is only a complaint, if some ranks had ended well before:
    the other ranks missed them.
    """
    cause, ranks = first(failures), named(finished)
    if cause is None or cause.standing == "cause" or not ranks:
        return ""
    return f"{ranks} had finished before that: do all ranks take the same number of steps?"


def named(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0, 1 and 3"."""
    listed = [str(rank) for rank in sorted(ranks)]
    if len(listed) < 2:
        return f"rank {listed[0]}" if listed else ""
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"


def _precedence(failure: Failure) -> tuple[int, int, int]:
    if failure.killed or failure.kind == "usage":
        return 0, failure.monotonic_ns, failure.rank
    order = ("cause", "timeout", "consequence").index(failure.standing)
    return 1 + order, failure.monotonic_ns, failure.rank


def signal_name(number: int) -> str:
    """Return a signal's name: "signal 9 (SIGKILL)"."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
