"""A rank whose program is over and whose process is not: what Python waits for is said, where it was started and where it is now.

Python ends a process when all threads that are not daemon threads have ended, then processes of multiprocessing, then exit handlers. Ranks wait for
them too, however long that takes: a thread may be writing the user's file. Nobody waits silently: after five seconds the rank says what it waits for.

    rank       announce(tell)   a thread beside the one that waits, so that it also sees threads that are started meanwhile
    launcher   Endings          prints what ranks have left for it, and looks itself where a rank cannot say
"""

from __future__ import annotations

import functools
import inspect
import json
import linecache
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from lockstep import status
from lockstep.launcher import processes
from lockstep.launcher.failures import is_users, named
from lockstep.launcher.stalls import stack_of

PATIENCE = 5.0
"""Seconds for which a program's end is nobody's affair."""
HELD = "held"
"""Suffix of the file in which a rank tells its launcher what it waits for."""
_LAUNCHERS_PATIENCE = 8.0  # a rank that is still there and has not said why cannot
_LOOK_SECONDS = 1.0
_ADVICE = "The run waits, as plain Python does; press Ctrl-C to end it. Join the thread in the program, or start it with daemon=True."


@dataclass(frozen=True, slots=True)
class Held:
    """What a process waits for, in words, and where that is."""

    what: str
    stack: str

    def said_of(self, who: str, several: bool) -> str:
        """For a person: the stack, then the sentences."""
        words = (
            "have finished, but their processes do not end: they wait"
            if several
            else "has finished, but its process does not end: it waits"
        )
        sentence = f"{who} {words} for {self.what}. {_ADVICE}"
        return "\n".join(part for part in (self.stack.rstrip(), sentence) if part)


def announce(tell: Callable[[Held], object], after: float = PATIENCE) -> None:
    """The program is over. If the process has not ended `after` seconds from now, `tell` hears once what it waits for."""

    def watch() -> None:
        time.sleep(after)
        tell(waits_for())

    threading.Thread(target=watch, name="lockstep-ending", daemon=True).start()


def announce_to_terminal(rank: int) -> None:
    """`announce` where no launcher of ours listens: on this process's stderr."""
    announce(lambda held: print(held.said_of(f"rank {rank} (pid {os.getpid()})", several=False), file=sys.stderr, flush=True))


def announce_to_launcher(directory: Path, rank: int) -> None:
    """`announce` by a file for the launcher."""
    announce(lambda held: leave(directory, rank, held))


def leave(directory: Path, rank: int, held: Held) -> None:
    """Tell the launcher, by a file that is whole or not there."""
    file = _file(directory, rank)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(held)), encoding="utf-8")
    unfinished.replace(file)


def waits_for() -> Held:
    """What keeps this process, as Python's end comes to it: threads, then processes, else an exit handler."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if threads:
        what = " and ".join(_thread(thread, frames) for thread in threads)
        stacks = [f"Stack of {thread.name!r}:\n{_shown(frames.get(thread.ident or 0))}" for thread in threads]
        return Held(what, "\n".join(stacks))
    children = [child for child in multiprocessing.active_children() if not child.daemon]
    main = _shown(frames.get(threading.main_thread().ident or 0))
    if children:
        return Held(" and ".join(f"the process {child.name!r} (pid {child.pid}) that it has started" for child in children), main)
    return Held("an exit handler, or the end of a library", main)


def _thread(thread: threading.Thread, frames: Mapping[int, FrameType]) -> str:
    """ "the thread 'uploader' (runs upload, train.py:12; now at train.py:14 upload)" """
    started = _place(_function(thread))
    now = processes.users_line(
        [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in _walk(frames.get(thread.ident or 0))]
    )
    return f"the thread {thread.name!r} (runs {started}{f'; now at {now}' if now else ''})"


def _function(thread: threading.Thread) -> object:
    """What it was started to run: its target, the function of a Timer, the `run` of a class of the user's own."""
    return getattr(thread, "_target", None) or getattr(thread, "function", None) or type(thread).run


def _place(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name}, {os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _walk(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Innermost first."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found


def _shown(frame: FrameType | None) -> str:
    """Outermost first, from the first frame of the user's own code on, if there is one."""
    frames = _walk(frame)[::-1]
    first = next((place for place, (each, _) in enumerate(frames) if is_users(each.f_code.co_filename)), 0)
    lines = []
    for each, number in frames[first:]:
        file = each.f_code.co_filename
        lines.append(f'  File "{file}", line {number}, in {each.f_code.co_name}')
        if source := linecache.getline(file, number).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)


def waits(directory: Path, rank: int) -> bool:
    """Whether this rank's program is over, and it has been said what its process waits for."""
    return _file(directory, rank).exists()


class Endings:
    """The launcher's side: looks now and then whether a rank waits at its end, and gives what is to be said of it, once for each."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._looked = clock()
        self._over: dict[int, float] = {}  # since when a rank's program is seen to be over
        self._said: set[int] = set()

    def look(self, pids: Mapping[int, int]) -> list[str]:
        """What is to be said now; `pids` are those that live, by rank. Ranks that wait for the same are named together."""
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return []
        self._looked = now
        found: dict[Held, list[int]] = {}
        for rank in sorted(set(pids) - self._said):
            held = self._told(rank) or self._seen(rank, pids[rank])
            if held is not None:
                found.setdefault(held, []).append(rank)
                self._said.add(rank)
        return [held.said_of(_who(ranks, pids), len(ranks) > 1) for held, ranks in found.items()]

    def _told(self, rank: int) -> Held | None:
        file = _file(self._directory, rank)
        return Held(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    def _seen(self, rank: int, pid: int) -> Held | None:
        """Of a rank that should have said it by now: it is stopped, or native code holds the interpreter."""
        view = status.read(status.file_of(self._directory, rank))
        if view is None or view.phase != "end" or self._looked - self._over.setdefault(rank, self._looked) < _LAUNCHERS_PATIENCE:
            return None
        held = Held("a signal to continue: it is stopped (SIGSTOP or a debugger)", "")
        if processes.state(pid) != "T":
            held = Held("something that it cannot name", processes.ask_for_stack(pid, stack_of(self._directory, rank)))
        leave(self._directory, rank, held)
        return held


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.{HELD}"


def _who(ranks: list[int], pids: Mapping[int, int]) -> str:
    return f"rank {ranks[0]} (pid {pids[ranks[0]]})" if len(ranks) == 1 else named(ranks)
