"""Report a rank whose program is over but whose process runs: what Python waits for, where that was
started, and where it is now.

Python ends a process when all non-daemon threads have ended, then processes of multiprocessing,
then exit handlers. Ranks wait for them too, however long it takes: a thread may be writing the
user's file. But no rank waits silently: after five seconds it reports what it waits for.

    rank       announce(tell)   a separate thread, so that it also sees threads started meanwhile
    launcher   Endings          prints the ranks' reports, and looks itself if a rank cannot report
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import extract_stack

from lockstep.launcher import processes
from lockstep.launcher.failures import PACKAGE, named
from lockstep.launcher.processes import shown
from lockstep.launcher.stalls import stack_of
from lockstep.runtime import status
from lockstep.runtime.disk import write_whole

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
class Held:
    """What a process waits for, in words, and the stack of the place."""

    what: str
    stack: str

    def said_of(self, who: str, several: bool = False) -> str:
        """Return the report for the user: the stack, then the sentences."""
        words = (
            "finished, but their processes do not end: they wait"
            if several
            else "finished, but its process does not end: it waits"
        )
        sentence = f"{who} {'have' if several else 'has'} {words} for {self.what}. {_ADVICE}"
        return f"{self.stack.rstrip()}\n{sentence}".lstrip("\n")


def announce(tell: Callable[[Held], object]) -> None:
    """Record that the program is over. If the process still runs after `PATIENCE` seconds, not
    counting those in which it had no core, call `tell` once with what it waits for.
    """
    queued = processes.queued_seconds(os.getpid())

    def watch() -> None:
        held = None
        while held is None:
            time.sleep(PATIENCE)
            time.sleep(processes.queued_seconds(os.getpid()) - queued)
            held = waits_for()
        tell(held)

    threading.Thread(target=watch, name="lockstep-ending", daemon=True).start()


def announce_to_terminal(rank: int) -> None:
    """`announce` for a rank without Lockstep's launcher: print to this process's stderr."""
    announce(
        lambda held: print(
            held.said_of(f"rank {rank} (pid {os.getpid()})"), file=sys.stderr, flush=True
        )
    )


def leave(directory: Path, rank: int, held: Held) -> None:
    """Write the report for the launcher."""
    write_whole(_file(directory, rank), json.dumps(asdict(held)))


def waits_for() -> Held | None:
    """Return what keeps this process from ending. In Python's order: threads, then processes, else
    an exit handler. None while Lockstep itself flushes files or collects objects: on a busy host
    that takes seconds.
    """
    frames = sys._current_frames()
    stacks = {
        thread: extract_stack(frames[thread.ident])
        for thread in threading.enumerate()
        if thread.ident in frames
    }
    main = stacks.pop(threading.main_thread())
    threads = {thread: stack for thread, stack in stacks.items() if not thread.daemon}
    if threads:
        said = [
            f"the thread {thread.name!r} (runs {_place(_function(thread))}; now at"
            f" {processes.users_line(stack)})"
            for thread, stack in threads.items()
        ]
        return Held(
            " and ".join(said),
            "\n".join(
                f"Stack of {thread.name!r}:\n{shown(stack)}" for thread, stack in threads.items()
            ),
        )
    children = [child for child in multiprocessing.active_children() if not child.daemon]
    if children:
        return Held(
            " and ".join(
                f"the process {child.name!r} (pid {child.pid}) that it has started"
                for child in children
            ),
            shown(main),
        )
    if main[-1].filename.startswith(PACKAGE):
        return None
    return Held("an exit handler, or the end of a library", shown(main))


def _function(thread: threading.Thread) -> object:
    """Return what the thread runs: its target, a Timer's function, or the `run` of the user's own
    class.
    """
    return getattr(thread, "_target", None) or getattr(thread, "function", None) or type(thread).run


def _place(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return (
        name
        if code is None
        else f"{name}, {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    )


def waits(directory: Path, rank: int) -> bool:
    """Whether this rank's program is over, and the report of what its process waits for exists."""
    return _file(directory, rank).exists()


class Endings:
    """The launcher's side: checks now and then whether a rank waits at its end, and returns a
    report, once for each rank.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._looked = clock()
        # by rank: when its program was first seen to be over, not counting seconds without a core
        self._over: dict[int, float] = {}
        self._said: set[int] = set()

    def look(self, pids: Mapping[int, int]) -> list[str]:
        """Return the reports to print now. `pids` are the living ranks' pids, by rank. Ranks that
        wait for the same thing share a report.
        """
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return []
        self._looked = now
        found: dict[Held, list[int]] = {}
        for rank in sorted(set(pids) - self._said):
            self._look_at(rank, pids[rank])
            if (file := _file(self._directory, rank)).exists():
                self._said.add(rank)
                found.setdefault(Held(**json.loads(file.read_text(encoding="utf-8"))), []).append(
                    rank
                )
        return [
            held.said_of(
                named(ranks) if len(ranks) > 1 else f"rank {ranks[0]} (pid {pids[ranks[0]]})",
                len(ranks) > 1,
            )
            for held, ranks in found.items()
        ]

    def _look_at(self, rank: int, pid: int) -> None:
        """Report for a rank that should have reported by now: it is stopped, or native code holds
        its interpreter.
        """
        view = status.read(status.file_of(self._directory, rank))
        now = self._looked - processes.queued_seconds(pid)
        if view is None or view.phase != "end":
            return
        over = now - self._over.setdefault(rank, now)
        state = processes.state(pid)
        patience = _LAUNCHERS_PATIENCE * (_WORKS if state == processes.RUNNING else 1)
        if over < patience or waits(self._directory, rank):
            return
        if state == processes.STOPPED:
            held = Held("a signal to continue: it is stopped (SIGSTOP or a debugger)", "")
        else:
            stack = processes.ask_for_stack(pid, stack_of(self._directory, rank))
            held = Held("native code, which lets no thread of Python say what it does", stack)
        leave(self._directory, rank, held)


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.held"


def note_groups() -> None:
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


def of_strangers(directory: Path, ranks: Iterable[int], size: int) -> str:
    """Return `never_joined` for ranks that have ended well. "" if one has opened a process group,
    or has not noted its end.
    """
    views = [status.read(status.file_of(directory, rank)) for rank in ranks]
    alone = all(view is not None and view.phase == "end" and not view.opened for view in views)
    return never_joined(size) if alone and size > 1 else ""
