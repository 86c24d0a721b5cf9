"""Report a rank whose program is over but whose process runs: what Python waits for, where that was
started, and where it is now.

Python ends a process when all non-daemon threads have ended, then processes of multiprocessing,
then exit handlers. Ranks wait for them too, however long it takes: a thread may be writing the
user's file. But no rank waits silently: after five seconds it reports what it waits for.

    rank       watch_end(report)  a separate thread, so that it also sees threads started meanwhile
    launcher   EndWatcher         prints the ranks' reports, and looks itself if a rank cannot report
"""

from __future__ import annotations

import functools
import inspect
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import extract_stack

from lockstep.launcher.failures import named
from lockstep.launcher.stall_report import view_of, views_of
from lockstep.runtime import processes, status
from lockstep.runtime.disk import write_whole
from lockstep.runtime.failure_record import PACKAGE, rank_file
from lockstep.runtime.processes import Pids, format_stack

PATIENCE = 5.0
"""Seconds that a process may take to end before it is reported."""
# seconds; a rank that still runs then and has not reported why cannot report
_LAUNCHERS_PATIENCE = 8.0
_WORKS = 10  # times as long for a rank that is running: it may only be slow
_LOOK_SECONDS = 1.0
_ADVICE = (
    "The run waits, as plain Python does; press Ctrl-C to end it. Join the thread in the program,"
    " or start it with daemon=True."
)


@dataclass(frozen=True, slots=True)
class Blocker:
    """What a process waits for, in words, and the stack of the place."""

    reason: str
    stack: str

    def describe(self, ranks: str, several: bool = False) -> str:
        """Return the report for the user: the stack, then the sentences."""
        words = "has finished, but its process does not end: it waits"
        if several:
            words = "have finished, but their processes do not end: they wait"
        sentence = f"{ranks} {words} for {self.reason}. {_ADVICE}"
        return f"{self.stack.rstrip()}\n{sentence}".lstrip("\n")


def watch_end(report: Callable[[Blocker], object]) -> None:
    """Record that the program is over. If the process still runs after `PATIENCE` seconds, not
    counting those in which it had no core, call `report` once with what it waits for.
    """
    queued = processes.queued_seconds(os.getpid())

    def watch() -> None:
        blocker = None
        while blocker is None:
            time.sleep(PATIENCE)
            time.sleep(processes.queued_seconds(os.getpid()) - queued)
            blocker = find_blocker()
        report(blocker)

    threading.Thread(target=watch, name="lockstep-ending", daemon=True).start()


def watch_end_without_launcher(rank: int) -> None:
    """`watch_end` for a rank without Lockstep's launcher: print to this process's stderr."""

    def report(blocker: Blocker) -> None:
        print(blocker.describe(f"rank {rank} (pid {os.getpid()})"), file=sys.stderr, flush=True)

    watch_end(report)


def write_report(directory: Path, rank: int, blocker: Blocker) -> None:
    """Write the report for the launcher."""
    write_whole(rank_file(directory, rank, "waits"), json.dumps(asdict(blocker)))


def find_blocker() -> Blocker | None:
    """Return what keeps this process from ending. In Python's order: threads, then processes, else
    an exit handler. None while Lockstep itself flushes files or collects objects: on a busy host
    that takes seconds.
    """
    frames = sys._current_frames()
    main = extract_stack(frames[threading.main_thread().ident or 0])
    reasons = []
    stacks = []
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon and thread.ident in frames:
            stack = extract_stack(frames[thread.ident])
            line = processes.users_line(stack)
            reasons.append(
                f"the thread {thread.name!r} (runs {_describe(_function(thread))}; now at {line})"
            )
            stacks.append(f"Stack of {thread.name!r}:\n{format_stack(stack)}")
    if reasons:
        return Blocker(" and ".join(reasons), "\n".join(stacks))
    for child in multiprocessing.active_children():
        if not child.daemon:
            reasons.append(f"the process {child.name!r} (pid {child.pid}) that it has started")
    if reasons:
        return Blocker(" and ".join(reasons), format_stack(main))
    if main[-1].filename.startswith(PACKAGE):
        return None
    return Blocker("an exit handler, or the end of a library", format_stack(main))


def _function(thread: threading.Thread) -> object:
    """Return what the thread runs: its target, a Timer's function, or the `run` of the user's own
    class.
    """
    return getattr(thread, "_target", None) or getattr(thread, "function", None) or type(thread).run


def _describe(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if callable(function):
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    return f"{name}, {os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def reported(directory: Path, rank: int) -> bool:
    """Whether this rank's program is over, and the report of what its process waits for exists."""
    return rank_file(directory, rank, "waits").exists()


class EndWatcher:
    """The launcher's side: checks now and then whether a rank waits at its end, and returns a
    report, once for each rank.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._checked = clock()
        # by rank: when its program was first seen to be over, not counting seconds without a core
        self._over: dict[int, float] = {}
        self._reported: set[int] = set()

    def check(self, pids: Pids) -> list[str]:
        """Return the reports to print now. Ranks that wait for the same thing share a report."""
        now = self._clock()
        if now - self._checked < _LOOK_SECONDS:
            return []
        self._checked = now
        ranks_by_blocker: dict[Blocker, list[int]] = {}
        for rank in sorted(pids.keys() - self._reported):
            self._report_for(rank, pids[rank])
            file = rank_file(self._directory, rank, "waits")
            if file.exists():
                self._reported.add(rank)
                blocker = Blocker(**json.loads(file.read_text(encoding="utf-8")))
                ranks_by_blocker.setdefault(blocker, []).append(rank)
        reports = []
        for blocker, ranks in ranks_by_blocker.items():
            several = len(ranks) > 1
            names = named(ranks)
            if not several:
                names += f" (pid {pids[ranks[0]]})"
            reports.append(blocker.describe(names, several))
        return reports

    def _report_for(self, rank: int, pid: int) -> None:
        """Report for a rank that should have reported by now: it is stopped, or native code holds
        its interpreter.
        """
        view = view_of(self._directory, rank)
        if view is None or view.phase != "end":
            return
        now = self._checked - processes.queued_seconds(pid)
        over = now - self._over.setdefault(rank, now)
        state = processes.state(pid)
        patience = _LAUNCHERS_PATIENCE * (_WORKS if state == processes.RUNNING else 1)
        if over < patience or reported(self._directory, rank):
            return
        if state == processes.STOPPED:
            blocker = Blocker("a signal to continue: it is stopped (SIGSTOP or a debugger)", "")
        else:
            stack = processes.ask_for_stack(pid, processes.stack_of(self._directory, rank))
            reason = "native code, which lets no thread of Python say what it does"
            blocker = Blocker(reason, stack)
        write_report(self._directory, rank, blocker)


def note_process_group() -> None:
    """In a rank whose program is over: note whether torch has had a process group here, even if it
    is closed again.

    `lockstep.init()` notes it itself. torch leaves traces: its hook for exceptions, the name of the
    rendezvous, or the open group.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and (
        getattr(sys.excepthook, "__module__", "") == c10d.__name__
        or getattr(c10d, "_default_pg_init_method", None) is not None
        or c10d.is_initialized()
    ):
        status.opened()


def never_joined(size: int) -> str:
    """Return the warning for ranks that never opened a process group: each has run the program
    once, on the same data and into the same files.
    """
    return (
        f"warning: the {size} ranks never joined: each ran the whole program by itself, on all of"
        " its data. Call lockstep.init() or torch.distributed.init_process_group() in the program,"
        " or start it with --workers 1."
    )


def warning_if_never_joined(directory: Path, ranks: Collection[int], size: int) -> str:
    """Return `never_joined` for ranks that have ended well. "" if one has opened a process group,
    or has not noted its end.
    """
    views = views_of(directory, ranks).values()
    if size == 1 or len(views) < len(ranks):
        return ""
    alone = all(view.phase == "end" and not view.opened for view in views)
    return never_joined(size) if alone else ""
