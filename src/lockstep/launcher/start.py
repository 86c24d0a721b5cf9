"""Start processes on this host: the launcher's side of the fork server (fork_server.py).

A process keeps its fork servers until it ends, so a second call forks at once. Some variables, such
as OMP_NUM_THREADS, take effect when an interpreter or a library starts, and cannot be changed in a
forked process. Each set of their values gets its own server.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.errors import LockstepError
from lockstep.launcher.failures import signal_name
from lockstep.launcher.fork_server import Variables, flags, interpreter, with_huge_pages
from lockstep.runtime import processes
from lockstep.runtime.streams import open_closed_streams

FOR_SCRIPTS = (
    "torch",
    "lockstep.launcher.rank",
    "lockstep.world.world",
    "torch._dynamo",
)
"""What a program on several ranks imports sooner or later. A process's first optimizer imports the
last of them.
"""
FOR_TRAININGS = (
    *FOR_SCRIPTS,
    "lockstep.training.train",
    "lockstep.collectives.in_process",
    "numpy.ma",
    "numpy.ctypeslib",
    "torch.utils.tensorboard.summary",
)
"""Everything that a rank of `lockstep train` imports until it ends, as far as it is installed.

lockstep.training.worker is left out: it runs as the main program, and runpy would warn that it is
already imported.
"""

WARM = "LOCKSTEP_WARM_SERVER"
"""Environment variable: the socket at which commands of this user get a fork of a fork server that
has imported torch already (lockstep.testing.warm_commands).
"""
ALIKE = f"{WARM}_ALIKE"
"""Environment variable: what the launchers must have in common with that server."""

_LIBRARIES = r"(?:OMP|GOMP|KMP|MKL|OPENBLAS|TRITON|ATEN|PYTORCH|TORCH(?!ELASTIC))_?[A-Z0-9_]*"
_ACTS_AT_START = re.compile(rf"PYTHON|LD_|MALLOC_|GLIBC_|{_LIBRARIES}")
_SET_BY_SCRIPT = re.compile(
    rf"""(?:environ\s*\[|setdefault\(|putenv\()\s*["']({_LIBRARIES})["']|environ\.update\([^)]*?\b({_LIBRARIES})\b"""
)
_MOST_SERVERS = 2
_LOOK_SECONDS = 0.05


class ServerGone(LockstepError):
    """The process that forks ranks has ended, or cannot fork."""


class ForkServer:
    """A fork server, and the processes that it has forked for this process."""

    def __init__(
        self,
        control: socket.socket,
        pid: int,
        process: subprocess.Popen[bytes] | None = None,
        *,
        cold: bool = False,
    ) -> None:
        """`process`: the server, if it is a child of this process. `cold`: every process that it
        starts is a fresh interpreter.
        """
        self.pid = pid
        self.modules: list[str] = []
        """The modules that the server has to import before it forks."""
        self._socket = control
        self._connection = Connection(os.dup(control.fileno()))
        self._process = process
        self._cold = cold
        self._cold_reason = ""
        self._lock = threading.Lock()

    @classmethod
    def start(
        cls, modules: Sequence[str], environment: Variables, *, cold: bool = False
    ) -> ForkServer:
        """Start a server, which begins to import the modules, or fork the one that `WARM` names."""
        open_closed_streams()
        if not cold:
            server = _fork_of_warm_server(environment)
            if server is not None:
                return server
        # 0: the server does not die with this process. Otherwise the kernel would kill it when this
        # thread ends.
        in_main_thread = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if in_main_thread else 0
        local, remote = socket.socketpair()
        with remote:
            process = subprocess.Popen(
                interpreter("serve", remote.fileno(), parent, *modules),
                env=with_huge_pages(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                start_new_session=True,
            )
        return cls(local, process.pid, process, cold=cold)

    @property
    def alive(self) -> bool:
        with self._lock, suppress(OSError):
            return not self._connection.poll()  # without a request there is only the end to read
        return False

    def ready(self, check: Callable[[], object] = lambda: None) -> None:
        """Wait until everything is imported. `check` is called meanwhile, and may raise. If ranks
        cannot be forked from the server, print why.
        """
        reason = self._ask("ready", self.modules, check=check)
        if reason and not self._cold_reason:
            text = f"lockstep: ranks start without preloaded modules, which takes longer: {reason}"
            print(text, file=sys.stderr, flush=True)
        self._cold_reason = reason

    def fork(
        self,
        work: Callable[..., object],
        descriptors: Sequence[int] = (),
        environment: Variables = os.environ,
        *,
        streams: Sequence[int] = (0, 1, 2),
        beside: Collection[str] = (),
        cold: bool = False,
    ) -> int:
        """Start a process that runs `work(*descriptors)`, in this process's working directory, and
        then ends. Return its pid.

        Args:
            work: is pickled, with all that it holds.
            descriptors: this process's; the new one gets them under other numbers.
            beside: names of modules that must come from the program's own folder. If the server has
                imported one of them, the process is a fresh interpreter.
            cold: it is one anyway.

        Raises:
            ServerGone: the server has ended, or the system lets it start no process.
        """
        settings = pickle.dumps(work), dict(environment), os.getcwd()
        passed = [*streams, *descriptors]
        result = self._ask(
            "fork", settings, len(passed), beside, cold or self._cold, descriptors=passed
        )
        if not isinstance(result, int):
            raise ServerGone("process-not-started", why=result)
        return result

    def ask(self, work: Callable[[int], object]) -> tuple[int, BinaryIO]:
        """Start a process that runs `work(descriptor)`. Return its pid, and a stream of what it
        writes to the descriptor. The caller closes the stream and releases the pid.
        """
        reading, writing = os.pipe()
        stream = os.fdopen(reading, "rb")
        try:
            return self.fork(work, [writing]), stream
        except BaseException:
            stream.close()
            raise
        finally:
            os.close(writing)

    def answer(self, work: Callable[[int], object]) -> bytes:
        """Run `work(descriptor)` in a separate process until it ends. Return what it writes, b"" if
        nothing.
        """
        pid, stream = self.ask(work)
        with stream:
            text = stream.read()
        self.release(pid)
        return text

    def codes(self, pids: Collection[int]) -> dict[int, int | None]:
        """Return how processes that were forked here have ended, by pid: the exit code, -n if
        signal n killed it, None while it runs.
        """
        result: dict[int, int | None] = self._ask("codes", list(pids))
        return result

    def wait(self, seconds: float) -> None:
        """Wait until a process ends, for at most `seconds`."""
        self._ask("wait", seconds)

    def release(self, pid: int) -> None:
        """Wait until a process has ended, and let the server reap it. From now on its pid may mean
        another process.
        """
        with suppress(ServerGone):
            self._ask("reap", pid)

    def state(self, pid: int) -> str:
        """Return `processes.state(pid)`."""
        return processes.state(pid)

    def groups(self, pids: Collection[int]) -> dict[int, dict[int, str]]:
        """Return `processes.groups(pids)`."""
        return processes.groups(pids)

    def send_signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to the process group of a process that was forked here."""
        with suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # the process has no group of its own yet
                os.kill(pid, number)

    def close(self) -> None:
        """End the server, all processes that it has forked, and what its imports have started."""
        self._connection.close()
        self._socket.close()
        if self._process is not None and self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def _ask(
        self,
        kind: str,
        *content: object,
        descriptors: Sequence[int] = (),
        check: Callable[[], object] = lambda: None,
    ) -> Any:
        """Return the server's answer to a request. If this is interrupted, for example by Ctrl-C in
        a notebook, the server is ended: otherwise the next request would get this answer.
        """
        try:
            with self._lock:
                self._connection.send((kind, *content))
                if descriptors:
                    socket.send_fds(self._socket, [b"."], descriptors)
                while not self._connection.poll(_LOOK_SECONDS):
                    check()
                return self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._gone() from None
        except OSError as error:
            raise self._gone() from error
        except BaseException:
            self.close()
            raise

    def _gone(self) -> ServerGone:
        reason = "has ended"
        if self._process is not None:  # else its exit code is its parent's to know
            code = self._process.wait()
            killed = code < 0
            reason = (
                f"was killed by {signal_name(-code)}" if killed else f"ended with exit code {code}"
            )
        return ServerGone("fork-server-gone", pid=self.pid, how=reason)


# -- the fork servers of this process --------------------------------------------------------------

_servers: dict[tuple[object, ...], ForkServer] = {}


def fork_server(
    modules: Sequence[str] = FOR_SCRIPTS,
    environment: Variables = os.environ,
    *,
    cold: bool = False,
) -> ForkServer:
    """Return this process's server for ranks with this environment, which imports these modules.
    Start it if there is none.

    `cold`: the server imports nothing, and each rank is a fresh interpreter.
    """
    cold = cold or sys.platform != "linux"
    modules = () if cold else modules
    # a forked process must not use its parent's servers
    key = os.getpid(), cold, *acting(environment)
    server = _servers.pop(key, None)
    if server is None or not server.alive:
        while len(_servers) >= _MOST_SERVERS:
            _servers.pop(next(iter(_servers))).close()
        server = ForkServer.start(modules, environment, cold=cold)
    _servers[key] = server  # the most recently used is last
    server.modules = [*dict.fromkeys((*server.modules, *modules))]
    return server


def pids() -> set[int]:
    """Return the pids of this process's servers, which run until it ends."""
    return {server.pid for server in _servers.values()}


@atexit.register
def close_all() -> None:
    """End all servers of this process."""
    while _servers:
        _servers.popitem()[1].close()


def gpus() -> int:
    """Return the number of GPUs of this host that torch can use. A separate process asks torch,
    since asking may open them.
    """
    return int(fork_server().answer(_count_gpus) or b"0")


def _count_gpus(descriptor: int) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    os.write(descriptor, str(count).encode())


def alike(environment: Variables) -> str:
    """Return what a launcher must have in common with a server that another process has started:
    flags, variables, and namespaces of the kernel.
    """
    namespaces = sorted(os.readlink(entry) for entry in Path("/proc/self/ns").iterdir())
    return json.dumps([flags(), acting(environment), namespaces])


@contextmanager
def own_servers() -> Iterator[None]:
    """End the servers that are started in the block with the block."""
    earlier = dict(_servers)
    try:
        yield
    finally:
        for key, server in list(_servers.items()):
            if earlier.get(key) is not server:
                _servers.pop(key).close()


def _fork_of_warm_server(environment: Variables) -> ForkServer | None:
    """Return a fork of the server that `WARM` names. None if there is none, or if it cannot replace
    a server of this process's own.
    """
    path = environment.get(WARM)
    if path is not None and environment.get(ALIKE) == alike(environment):
        control = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            control.connect(path)
            pid = control.recv(32)
            if pid:
                return ForkServer(control, int(pid))
        control.close()
    return None


# -- what takes effect when a library starts -------------------------------------------------------


def acting(environment: Variables) -> list[tuple[str, str]]:
    """Return the variables that take effect when an interpreter or a library starts. Other values
    of them need another server.
    """
    return sorted(
        (name, value) for name, value in environment.items() if _ACTS_AT_START.match(name)
    )


def set_by(script: Path) -> str:
    """Return the first variable that a script sets itself and that takes effect when a library
    starts. "" if there is none, or if the file is no text.
    """
    try:
        match = _SET_BY_SCRIPT.search(script.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if match is None else match[1] or match[2]
