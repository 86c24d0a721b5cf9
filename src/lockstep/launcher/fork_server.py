"""The fork server: a process that imports torch once, and then forks processes for its launcher.

    launcher (start.py)                fork server                    new process
    "ready", modules          ----->   imports them
                              <-----   "", or why none is to be forked
    "fork", ... + descriptors ----->   fork() -------------------->   work(*descriptors)
                              <-----   pid, or why there is none
    "wait", seconds           ----->   waits until a process ends
    "codes", pids             ----->
                              <-----   their exit codes
    "reap", pid               ----->   until then the pid means this process, and its group

The server has only one thread: a lock that another thread holds at a fork stays locked in the child
forever. If an import has started a thread or opened a GPU, the new process executes a fresh
interpreter instead (a cold start). The server ends as soon as its launcher has gone, and the kernel
ends its children with it.
"""

from __future__ import annotations

import errno
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from lockstep.runtime.process_lifetime import PARENT, die_with_parent

FOR_LAUNCHER = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that are for the launcher alone, although a scheduler sends some of them to all processes
of a job. The processes that serve its ranks end when the launcher says so, or has gone.
"""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_MALLOCS = ("jemalloc_bg_thd",)
"""Threads of an allocator that holds its own locks during a fork, and has no thread in the child.
pyarrow starts one, and pandas, scikit-learn and datasets import pyarrow.
"""

Variables = Mapping[str, str]
"""Environment variables."""
Settings = tuple[bytes, Variables, str]
"""A new process's pickled work, environment and working directory."""

_set_by_imports: dict[str, str] = {}
"""Environment variables that modules set when the server imported them."""


def serve(control: socket.socket, modules: Sequence[str] = ()) -> Callable[[], None]:
    """Answer the launcher at the other end of `control`, until it has gone. First import `modules`.

    Returns only in a forked process: what that process has to do.
    """
    gc.disable()  # imports create many objects and drop few
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, *FOR_LAUNCHER))
    connection = Connection(os.dup(control.fileno()))
    why_cold = _import(modules)
    while True:
        try:
            kind, *content = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # the kernel ends the children
        answer: object = None
        if kind == "ready":
            why_cold = why_cold or _import(*content)
            answer = why_cold
        elif kind == "fork":
            settings, count, beside, cold = content
            server = os.getpid()
            _, descriptors, _, _ = socket.recv_fds(control, 1, count)
            cold = cold or bool(why_cold) or any(name in sys.modules for name in beside)
            answer = _fork(descriptors, count)
            if answer == 0:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                connection.close()
                control.close()
                return partial(_begin, server, settings, descriptors, cold=cold)
        elif kind == "wait":
            _wait_for_child(*content)
        elif kind == "codes":
            answer = {pid: _exit_code(pid) for pid in content[0]}
        else:
            os.waitpid(content[0], 0)
        with suppress(OSError):  # the launcher has gone; the next read shows that
            connection.send(answer)


def _import(modules: Sequence[str]) -> str:
    """Import the modules. Return why this process must not be forked after that; "" if it may. If
    an import fails, it fails again in the rank that needs it, with the rank's own traceback.
    """
    for name in modules:
        if name not in sys.modules:
            before = set(os.environ)
            with suppress(Exception):
                importlib.import_module(name)
            for variable in os.environ.keys() - before:
                _set_by_imports[variable] = os.environ[variable]
            reason = _unsafe()
            if reason:
                return f"importing {name} has {reason}"
    return ""


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
    for descriptor in Path("/proc/self/fd").glob("*"):
        file = os.path.realpath(descriptor)
        if file.startswith(_DEVICES):
            return f"opened {file}"
    return ""


def _has_threads() -> bool:
    """Whether this process has other threads than the calling one and those of `_MALLOCS`."""
    count = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            count += (thread / "comm").read_text().strip() not in _MALLOCS
    return count > 1


def _fork(descriptors: Sequence[int], count: int) -> int | str:
    """Fork this process. Return the child's pid, in the child 0, or why the system forks none. The
    server closes the descriptors.
    """
    result: int | str
    gc.freeze()
    try:
        if len(descriptors) < count:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        result = os.fork()
    except OSError as error:
        result = str(error.strerror)
    if result != 0:
        for descriptor in descriptors:
            os.close(descriptor)
    return result


def _wait_for_child(seconds: float) -> None:
    if sys.platform == "linux":
        signal.sigtimedwait([signal.SIGCHLD], seconds)
    else:
        time.sleep(min(seconds, 0.01))


def _exit_code(pid: int) -> int | None:
    """Return a child's exit code, -n if signal n killed it, None while it runs."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


# -- in the new process ----------------------------------------------------------------------------


def _begin(server: int, settings: Settings, descriptors: Sequence[int], *, cold: bool) -> None:
    with suppress(PermissionError):
        # Then Ctrl-C reaches only the launcher, and a signal to the process's group reaches its
        # children.
        os.setsid()
    if cold:
        _execute(server, settings, descriptors)
    # what a fresh process would have of its own; `random` has already reseeded itself
    multiprocessing.current_process().authkey = os.urandom(32)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    gc.enable()
    _run(server, settings, descriptors)


def _execute(server: int, settings: Settings, descriptors: Sequence[int]) -> None:
    """Replace this process by a fresh interpreter that does the same."""
    with tempfile.TemporaryFile() as file:
        pickle.dump(settings, file)
        file.seek(0)
        for descriptor in (file.fileno(), *descriptors):
            os.set_inheritable(descriptor, True)
        command = interpreter("fresh", server, file.fileno(), *descriptors)
        os.execve(command[0], command, with_huge_pages(settings[1]))


def _run(server: int, settings: Settings, descriptors: Sequence[int]) -> None:
    """Take the settings, and do the work. The first three descriptors become the streams."""
    work, environment, directory = settings
    os.environ.clear()
    os.environ.update({**_set_by_imports, **environment, PARENT: str(server)})
    die_with_parent(server)
    for stream, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.chdir(directory)
    pickle.loads(work)(*descriptors[3:])
    os._exit(0)


# -- a fresh interpreter ---------------------------------------------------------------------------


def interpreter(*arguments: object) -> list[str]:
    """Return the command for an interpreter with this one's flags that calls `main`."""
    call = "from lockstep.launcher.fork_server import main; main()"
    return [sys.executable, *flags(), "-P", "-c", call, *map(str, arguments)]


def flags() -> list[str]:
    """Return this interpreter's flags, to start another one with them. -P is left out: the caller
    adds it if the program needs it.
    """
    # as multiprocessing does
    python_flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    result = [flag for flag in python_flags if flag != "-P"]
    for name, value in sys._xoptions.items():
        option = name if value is True else f"{name}={value}"
        if option not in result:
            result += ["-X", option]
    return result


def with_huge_pages(environment: Variables) -> dict[str, str]:
    """Return an environment for a new interpreter in which glibc asks the kernel for huge pages.
    Every step allocates its gradients anew, and pages of 4 KiB, each cleared at its first use, cost
    a third of a small step.

    A user's own setting of glibc's tunables stays.
    """
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **environment}


def main() -> None:
    """Serve a launcher, or with "fresh" be the process of a cold start."""
    kind, number, *arguments = sys.argv[1:]
    if kind == "fresh":
        file, *descriptors = map(int, arguments)
        with os.fdopen(file, "rb") as stream:
            settings = pickle.load(stream)
        _run(int(number), settings, descriptors)
    parent, *modules = arguments
    if int(parent):
        die_with_parent(int(parent))
    serve(socket.socket(fileno=int(number)), modules)()
