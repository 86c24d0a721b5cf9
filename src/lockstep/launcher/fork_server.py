"""`python -m lockstep.launcher.fork_server`: a process that imports torch once, and forks ranks
when its launcher tells it to.

    launcher                        fork server                          rank
    ("import", names)  ---------->  imports them, one after the other
    ("ready", )        ---------->  has imported all, or says why not
    ("fork", seat) + streams ---->  fork() ---------------------------->  seat.take(); seat.work()
                       <----------  ("forked", pid)
                       <----------  ("ended", pid, code)  <-------------  ends
    ("release", pid)   ---------->  reaps it: until then the pid means this process, and its group
    ("warm", imports)  ---------->  imports these too, as another server's successor (successor.py)
                       <----------  ("warm", what the imports have done)

The server has only one thread: a lock that another thread holds at a fork stays locked in the child
forever. Before every fork the server checks that it has no other thread, except an allocator's that
is prepared for forks. If an import has started a thread or opened a GPU, the server executes a fresh
interpreter in the child instead (a cold start), and says why. It ends as soon as its launcher has
gone, and its children end with it.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lockstep.launcher import seat as seats
from lockstep.launcher.seat import Seat
from lockstep.launcher.successor import Warmth
from lockstep.runtime.process_lifetime import die_with_parent

FOR_LAUNCHER = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that are for the launcher alone, although a scheduler sends some of them to all processes
of a job. The processes that serve its ranks end when the launcher says so, or has gone.
"""
_LIMITS = {errno.EMFILE: " (ulimit -n)", errno.EAGAIN: " (ulimit -u)"}
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_MALLOCS = ("jemalloc_bg_thd",)
"""Threads of an allocator that holds its own locks during a fork, and has no thread in the child.
pyarrow starts one, and pandas, scikit-learn and datasets import pyarrow.
"""


class ForkServer:
    """The server's state: its launcher, the modules still to be imported, and its children."""

    def __init__(self, control: int, imports: Sequence[str] = (), *, cold: bool = False) -> None:
        os.set_inheritable(control, False)
        self._socket = socket.socket(fileno=os.dup(control))
        self._control = Connection(control)
        self._wanted = list(imports)
        self._libraries: Collection[str] = sys.modules
        self._children: dict[int, int | None] = {}  # pid: exit code, once it has ended
        self._cold = cold
        self._why_cold = ""
        # a child restores these
        self._handlers = {
            number: signal.signal(number, _let_the_launcher) for number in FOR_LAUNCHER
        }
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _let_the_launcher)

    def serve(self) -> Callable[[], None]:
        """Serve until the launcher has gone. Returns only in a child, with the child's work."""
        while True:
            waiting: list[Any] = [self._control, self._wake]
            ready, _, _ = select.select(waiting, [], [], 0 if self._wanted else None)
            if self._wake in ready:
                self._look_at_children()
            if self._control in ready:
                try:
                    request = self._control.recv()
                except (EOFError, OSError):
                    os._exit(0)  # the kernel ends the children
                work = self._answer(*request)
                if work is not None:
                    return work
            elif self._wanted:
                self._import(self._wanted.pop(0))

    def _answer(self, kind: str, content: Any) -> Callable[[], None] | None:
        if kind == "import":
            self._wanted += [
                name for name in content if name not in sys.modules and name not in self._wanted
            ]
        elif kind == "ready":
            self._import_all()
            self._say("ready", self._why_cold)
        elif kind == "release" and content in self._children:
            del self._children[content]
            os.waitpid(content, 0)
        elif kind == "warm":
            self._libraries = frozenset(sys.modules)
            imports, of_ranks = content
            self._say("warm", Warmth.of(imports, of_ranks, _unsafe))
        elif kind == "fork":
            return self._fork(*content)
        return None

    def _import(self, name: str) -> None:
        """Import a module. If that fails, it fails again in the rank that needs it, with the rank's
        own traceback.
        """
        if self._cold or self._why_cold:
            return
        with seats.keeping_variables(), suppress(Exception):
            importlib.import_module(name)
        if why := _unsafe():
            self._why_cold = f"importing {name} has {why}"

    def _import_all(self) -> None:
        while self._wanted:
            self._import(self._wanted.pop(0))

    def _fork(
        self, pickled: bytes, count: int, beside: Sequence[str], cold: bool
    ) -> Callable[[], None] | None:
        """Fork a child that gets the descriptors sent after the request. First import what is still
        wanted.
        """
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, count)
        server, pid, why = os.getpid(), -1, ""
        try:
            if len(descriptors) < count:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._import_all()
            cold = (
                cold
                or self._cold
                or bool(self._why_cold or _unsafe())
                or any(name in self._libraries for name in beside)
            )
            gc.freeze()
            pid = os.fork()
        except OSError as error:
            why = f"{error.strerror}{_LIMITS.get(error.errno or 0, '')}"
        if pid == 0:
            self._leave_to_child()
            return lambda: begin(pickled, server, descriptors, cold=cold)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._children[pid] = None
            self._say("forked", pid)
        else:
            self._say("failed", why)
        return None

    def _leave_to_child(self) -> None:
        """In a child: close and reset everything of the server's, except its imports."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for end in (self._wake, self._waker):
            os.close(end)
        self._socket.close()
        self._control.close()

    def _look_at_children(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake, 512):
                pass
        for pid, code in self._children.items():
            if code is None:
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None:
                    code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                    self._children[pid] = code
                    self._say("ended", (pid, code))

    def _say(self, kind: str, content: object) -> None:
        with suppress(OSError):  # the launcher has gone; the next read from it shows that
            self._control.send((kind, content))


@dataclass(frozen=True, slots=True)
class Serve:
    """The work of a process that is forked to be a fork server itself. Its own launcher is at the
    other end of the descriptor that it inherits.
    """

    def __call__(self) -> None:
        gc.disable()
        ForkServer(seats.inherited[0]).serve()()


def begin(pickled: bytes, server: int, descriptors: list[int], *, cold: bool = False) -> None:
    """In a child of process `server`: do what the pickled seat describes."""
    with suppress(PermissionError):
        # Then Ctrl-C reaches only the launcher, and a signal to the process's group reaches its
        # children.
        os.setsid()
    if cold:
        _execute(pickled, server, descriptors)
    seats.refresh()
    seat: Seat = pickle.loads(pickled)
    seat.take(server, descriptors)
    seat.work()


def _execute(pickled: bytes, server: int, descriptors: list[int]) -> None:
    file = seats.anonymous_file()
    seats.write_whole(file, pickled)
    for descriptor in (file, *descriptors):
        os.set_inheritable(descriptor, True)
    seat: Seat = pickle.loads(pickled)
    numbers = map(str, (server, file, *descriptors))
    command = [
        sys.executable,
        *seats.flags(),
        "-P",
        "-m",
        "lockstep.launcher.fork_server",
        "--fresh",
        *numbers,
    ]
    os.execve(sys.executable, command, seats.with_huge_pages(seat.environment))


def _let_the_launcher(number: int, frame: object) -> None:
    """Do nothing. A program that is executed would inherit `SIG_IGN`, but not this handler."""


def _unsafe() -> str:
    """Return why this process must not be forked; "" if it may. A thread that ends by itself at a
    fork, as OpenBLAS's threads do, is no reason, and neither is one of `_MALLOCS`.
    """
    if _has_threads():
        with suppress(OSError):  # if this process cannot fork, `_fork` reports that
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        if _has_threads():
            return "started a thread"
    device = next(
        (
            file
            for file in map(os.path.realpath, Path("/proc/self/fd").glob("*"))
            if file.startswith(_DEVICES)
        ),
        None,
    )
    return "" if device is None else f"opened {device}"


def _has_threads() -> bool:
    """Whether this process has other threads than the calling one and those of `_MALLOCS`."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            names.append(Path("/proc/self/task", thread, "comm").read_text().strip())
    return sum(name not in _MALLOCS for name in names) > 1


def main(argv: Sequence[str]) -> None:
    """Run the server, or with --fresh the seat of a cold start. Returns in a child whose program is
    over.
    """
    if argv[0] == "--fresh":
        server, file, *descriptors = map(int, argv[1:])
        seat: Seat = pickle.loads(seats.read_whole(file))
        os.close(file)
        seat.take(server, descriptors)
        seat.work()
        return
    control, parent, cold, *names = argv
    gc.disable()  # imports create many objects and drop few
    if int(parent):
        die_with_parent(int(parent))
    ForkServer(int(control), names, cold=cold == "cold").serve()()


if __name__ == "__main__":
    main(sys.argv[1:])
