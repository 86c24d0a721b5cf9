"""Which of several failures was the cause, and what the user is told of it.

When one rank fails, the others follow within milliseconds with errors about lost connections. Deaths
by signal and usage errors come before exceptions, these before timeouts, and these before complaints
about a peer. Within one class the earliest counts. What a rank records is in
runtime/failure_record.py.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.errors import WorkerFailed, entry_of
from lockstep.runtime.failure_record import PACKAGE, Failure, Kind, rank_file
from lockstep.runtime.streams import plain, spans

_MOST_NAMED = 8
_OF_SPAWN = ("ProcessRaisedException", "ProcessExitedException")
_SPAWNS = (
    "The program starts processes of its own with torch.multiprocessing.spawn, on every rank. If they"
    " are its ranks, start it with python, without a launcher."
)


def of_exit(code: int, rank: int, pid: int, *, message: str = "", traceback: str = "") -> Failure:
    """Return the record of a rank that left none, from its exit code. A code below 0 is the signal
    that killed it.
    """
    kind: Kind = "exit"
    if code < 0:
        kind = "signal"
        message = signal_name(-code)
        code = 128 - code
    return Failure(rank=rank, kind=kind, message=message, code=code, pid=pid, traceback=traceback)


def read_all(directory: Path) -> list[Failure]:
    """Return all records in `directory`, sorted by rank."""
    texts = [file.read_text(encoding="utf-8") for file in directory.glob("rank-*.json")]
    failures = [Failure(**json.loads(text)) for text in texts]
    return sorted(failures, key=lambda failure: failure.rank)


def of_ranks(
    directory: Path, codes: Mapping[int, int | None], pids: Mapping[int, int]
) -> list[Failure]:
    """Return the records that ranks left. For a rank that died without one, return what the system
    reports.
    """
    failures = read_all(directory)
    recorded = {failure.rank for failure in failures}
    for rank, code in codes.items():
        if code and rank not in recorded:
            stack = rank_file(directory, rank, "stack")
            dump = stack.read_text(errors="replace") if stack.exists() else ""
            failures.append(of_exit(code, rank, pids[rank], traceback=readable_stack(dump)))
    return failures


def first(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that explains the others; None if there is no failure."""
    return min(failures, key=_precedence, default=None)


def render(failure: Failure) -> str:
    """Return the text for the user: the rank's last output, its traceback, then a line that names
    it. For a usage error: one sentence.
    """
    if failure.kind == "usage":
        return plain(f"error: {failure.message}{_in_brackets(failure.user_line)}")
    output = ""
    if failure.tail:
        output = f"the last that rank {failure.rank} printed:\n{failure.tail}"
    parts = (output, failure.traceback.rstrip(), summary(failure), failure.note)
    return plain("\n".join(filter(None, parts)))


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def summary(failure: Failure) -> str:
    """Return one line: which rank, where it ran, what ended it."""
    text, *more = failure.message.strip().splitlines() or [""]
    if more and text.endswith(": ") and text.count(" ") == 1:
        text += more[-1].strip()  # as of torch's spawn, whose text begins with an empty line
    if failure.kind == "node":
        return f"node {failure.host} {text}"
    if failure.kind == "stall":
        return f"{failure.message} Its log: {failure.log}" if failure.log else failure.message
    log = f", log {failure.log}" if failure.log else ""
    rank = f"rank {failure.rank} (pid {failure.pid}, {failure.host}{log})"
    doing = f" {failure.doing}" if failure.doing else ""
    if failure.kind == "signal":
        killed = failure.code == 128 + signal.SIGKILL
        hint = "; the system does this when memory runs out" if killed else ""
        return f"{rank} was killed by {text}{doing}{hint}"
    if failure.kind != "exit":
        return f"{rank} failed{doing}: {text}"
    doing += _in_brackets(failure.user_line)
    if failure.traceback:  # sys.exit has interrupted Lockstep's own work
        return f"{rank} was ended by {text}{doing}: the other ranks cannot continue without it"
    message = f": {text}" if text else ""
    return f"{rank} exited with code {failure.code}{doing}{message}"


def worker_failed(cause: Failure) -> WorkerFailed:
    """Return the error that `lockstep.launch` raises for `cause`. It keeps the code of the rank's
    own error.
    """
    text = summary(cause)
    if cause.note:
        text += f"\n{cause.note}"
    if cause.traceback:
        text += f"\n\n{cause.traceback.rstrip()}"
    error = WorkerFailed(text, rank=cause.rank, traceback=cause.traceback)
    if entry_of(error.code):
        return error
    return WorkerFailed("rank-failed", rank=cause.rank, traceback=cause.traceback, text=text)


def readable_stack(dump: str) -> str:
    """Return a fatal signal's stack as faulthandler wrote it, without the launcher's frames and the
    list of extension modules.
    """
    lines = []
    for line in dump.partition("\nExtension modules:")[0].splitlines():
        of_launcher = PACKAGE in line and "launcher" in line
        if not of_launcher and "<frozen runpy>" not in line:
            lines.append(line)
    return "\n".join(lines)


def advice(failures: Iterable[Failure], finished: Iterable[int]) -> str:
    """Return the note for the user on the cause: it is only a complaint, and some ranks that the
    others missed had ended well before; or the program starts ranks of its own.
    """
    cause = first(failures)
    if cause is not None and cause.message.startswith(_OF_SPAWN):
        return _SPAWNS
    ranks = named(finished)
    if cause is None or cause.standing == "cause" or not ranks:
        return ""
    return f"{ranks} had finished before that: do all ranks take the same number of steps?"


def named(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0, 1 and 3"; of more than eight "ranks 0-4,6-15"."""
    numbers = sorted(ranks)
    if len(numbers) > _MOST_NAMED:
        return f"ranks {spans(numbers)}"
    *others, last = [str(rank) for rank in numbers] or [""]
    if not others:
        return f"rank {last}" if last else ""
    return f"ranks {', '.join(others)} and {last}"


def _precedence(failure: Failure) -> tuple[int, int, int]:
    order = 1 + ("cause", "timeout", "consequence").index(failure.standing)
    if failure.killed or failure.kind == "usage":
        order = 0
    return order, failure.monotonic_ns, failure.rank


def signal_name(number: int) -> str:
    """Return a signal's name: "signal 9 (SIGKILL)"."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
