"""The launcher's side of fork servers (fork_server.py): start one early, make it import and fork,
and learn how its children end.

A process keeps its servers warm until it ends, so a second call forks at once. Some variables, such
as OMP_NUM_THREADS, take effect when an interpreter or a library starts, and cannot be changed in a
forked process. Each set of their values gets its own server.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import psutil

from lockstep.errors import LockstepError, UsageError
from lockstep.launcher import processes
from lockstep.launcher import seat as seats
from lockstep.launcher.early import open_streams
from lockstep.launcher.failures import signal_name
from lockstep.launcher.fork_server import Serve
from lockstep.launcher.seat import Seat
from lockstep.launcher.successor import Imports, Warmth

FOR_SCRIPTS = (
    "torch",
    "torch.distributed",
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
    "lockstep.training.resolve",
    "lockstep.collectives.in_process",
    "numpy.ma",
    "numpy.ctypeslib",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
    "torch.utils.tensorboard.summary",
)
"""Everything that a rank of `lockstep train` imports until it ends, as far as it is installed.

lockstep.training.worker is left out: it runs as the main program, and runpy would warn that it is
already imported.
"""

WARM = "LOCKSTEP_WARM_SERVER"
"""Environment variable: the socket of a server from which commands of this user may fork their
ranks (lockstep.testing.warm_commands).
"""
ALIKE = f"{WARM}_ALIKE"
"""Environment variable: what that server's launchers must have in common with it."""
MOST_DESCRIPTORS = 253
"""Maximum number of descriptors that the system passes to another process at once."""
_MOST_SERVERS = 2
_STREAMS = (0, 1, 2)
_LOOK_SECONDS = 0.05
_STOPPED_SECONDS = 1.0  # seconds; a server that has not forked by then may be stopped (SIGSTOP)


class ServerGone(LockstepError):
    """The process that forks ranks has ended, or cannot fork."""


class Server:
    """One fork server, until it is closed."""

    def __init__(
        self, process: psutil.Process, control: socket.socket, environment: Mapping[str, str]
    ) -> None:
        self._process = process
        self._socket = control
        self._control = Connection(os.dup(control.fileno()))
        self._lock = threading.RLock()
        self._codes: dict[int, int] = {}
        self._environment = dict(environment)
        self._warmth: Warmth | None = None  # a successor's report, once it has arrived
        self._successor: Server | None = None
        self._why_cold: str | None = None  # None until the server has reported it
        self.owner = os.getpid()
        self.stays = False
        """Whether it is kept when there are too many servers."""

    @classmethod
    def start(cls, imports: Sequence[str], environment: Mapping[str, str], *, cold: bool) -> Server:
        """Start a new process, or fork the server that `WARM` names."""
        open_streams()
        ours, theirs = socket.socketpair()
        with theirs:
            process = (None if cold else _served(environment, theirs)) or _started(
                theirs, imports, environment, cold=cold
            )
        return cls(process, ours, environment)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_running()) and processes.state(self.pid) != processes.DEAD

    def prepare(self, imports: Sequence[str]) -> None:
        """Make the server import these modules too, before it forks again."""
        self._send("import", list(imports))

    def ready(self, look: Callable[[], object] = lambda: None) -> None:
        """Wait until everything is imported. `look` is called meanwhile, and may raise. If ranks
        cannot be forked from the server, print why.
        """
        with self._lock, self._whole():
            self._send("ready", None)
            while not self._heard(_LOOK_SECONDS):
                look()
            while (heard := self._receive())[0] != "ready":
                look()
        if heard[1] and not self._why_cold:
            print(
                f"lockstep: ranks start without preloaded modules, which takes longer: {heard[1]}",
                file=sys.stderr,
                flush=True,
            )
        self._why_cold = str(heard[1])

    def fork(
        self,
        seat: Seat,
        descriptors: Sequence[int] = _STREAMS,
        *,
        cold: bool = False,
        beside: Sequence[str] = (),
    ) -> int:
        """Start a process and return its pid. The first three of `descriptors` become its streams,
        and the others its `inherited` descriptors.

        Args:
            cold: start a fresh interpreter, whatever the server has imported.
            beside: names of modules that must come from the program's own folder. If the server has
                imported one of them, the start is a cold one.

        Raises:
            ServerGone: the server has ended, or the system lets it start no process.
        """
        if len(descriptors) > MOST_DESCRIPTORS:
            raise UsageError("too-many-descriptors", count=len(descriptors), most=MOST_DESCRIPTORS)
        with self._lock, self._whole():
            self._send("fork", (pickle.dumps(seat), len(descriptors), list(beside), cold))
            with suppress(ConnectionError):  # if the server has ended, the next read reports it
                socket.send_fds(self._socket, [b"."], list(descriptors))
            while True:
                while not self._heard(_STOPPED_SECONDS):
                    self.resume()
                kind, content = self._receive()
                if kind == "forked":
                    assert isinstance(content, int)
                    self._codes.pop(content, None)  # of an earlier process with this pid
                    return content
                if kind == "failed":
                    raise ServerGone("process-not-started", why=str(content))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Keep a question and its answer together. If they are interrupted, for example by Ctrl-C
        in a notebook, the server is ended: otherwise the next question would get this answer.
        """
        try:
            yield
        except ServerGone:
            raise
        except BaseException:
            self.close()
            raise

    def code(self, pid: int) -> int | None:
        """Return how a process that was forked here has ended: its exit code, -n if signal n killed
        it, None while it runs.
        """
        with self._lock:
            while self._heard(0):
                self._receive()
        return self._codes.get(pid)

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

    def wait(self, seconds: float) -> None:
        """Wait until the server reports something, for at most `seconds`."""
        with self._lock:
            if self._heard(seconds):
                self._receive()

    def resume(self) -> None:
        """Continue the server if it was stopped (SIGSTOP): a stopped server cannot report how ranks
        end.
        """
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def release(self, pid: int) -> None:
        """Let the server reap a process. From now on its pid may mean another process."""
        with suppress(ServerGone):
            self._send("release", pid)

    def ask(self, work: Callable[[int], None]) -> tuple[int, BinaryIO]:
        """Start a process that runs `work(descriptor)`. Return its pid, and a stream of what it
        writes to the descriptor. The caller closes the stream and releases the pid.
        """
        reading, writing = os.pipe()
        try:
            return self.fork(Seat(work=Answer(work)), [*_STREAMS, writing]), os.fdopen(
                reading, "rb"
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)

    def answer(self, work: Callable[[int], None]) -> bytes:
        """Run `work(descriptor)` in a separate process until it ends. Return what it writes, b"" if
        nothing.
        """
        pid, stream = self.ask(work)
        with stream:
            said = stream.read()
        self.release(pid)
        return said

    def prepare_successor(self, imports: Imports, of_ranks: Sequence[str]) -> None:
        """Fork a successor that imports these modules too (successor.py), if there is none.
        `of_ranks`: the variables that differ between ranks.
        """
        if self._successor is not None or self._why_cold:
            return
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull, "r+b") as nothing, suppress(ServerGone):
            # without a successor, ranks import for themselves
            pid = self.fork(
                Seat(work=Serve(), environment=self._environment),
                (*[nothing.fileno()] * 3, theirs.fileno()),
            )
            self._successor = Server(psutil.Process(pid), ours, self._environment)
            self._successor._send("warm", (imports, list(of_ranks)))

    def newest(self, patience: float = 0.0) -> Server:
        """Return the successor if it is ready and safe to fork, else this server. `patience`:
        seconds to wait for its imports; after that the successor is ended.
        """
        if (successor := self._successor) is None:
            return self
        with suppress(ServerGone):
            while successor._warmth is None and successor._heard(patience):
                kind, content = successor._receive()
                if kind == "warm":
                    assert isinstance(content, Warmth)
                    successor._warmth = content
        if successor._warmth is not None and successor._warmth.holds() and successor.alive:
            return successor
        self._successor = None
        successor.close()
        self.release(successor.pid)
        return self

    def close(self) -> None:
        """End the server, all processes that it has forked, and what its imports have started."""
        if self._successor is not None:
            self._successor.close()
        if self.owner == os.getpid() and self.alive:
            for end in (os.killpg, os.kill):  # the server has no group of its own yet
                with suppress(ProcessLookupError):
                    end(self.pid, signal.SIGKILL)
            self._wait()
        self._control.close()
        self._socket.close()

    def _send(self, kind: str, content: object) -> None:
        try:
            # never between another thread's request and the descriptors that follow it
            with self._lock:
                self._control.send((kind, content))
        except OSError:
            raise self._gone() from None

    def _heard(self, seconds: float) -> bool:
        try:
            return self._control.poll(seconds)
        except OSError:  # closed
            raise self._gone() from None

    def _receive(self) -> tuple[str, object]:
        try:
            kind, content = self._control.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        except BaseException:
            self.close()  # half of a message may have been read
            raise
        if kind == "ended":
            pid, code = content
            self._codes[pid] = code
        return kind, content

    def _wait(self) -> int:
        """Return how the server has ended; 0 if it is not this process's child, so that this is
        unknown.
        """
        return int(self._process.wait()) if isinstance(self._process, psutil.Popen) else 0

    def _gone(self) -> ServerGone:
        code = self._wait()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        hint = "; the system does this when memory runs out" if code == -signal.SIGKILL else ""
        return ServerGone("fork-server-gone", pid=self.pid, how=f"{how}{hint}")


@dataclass(frozen=True, slots=True)
class Answer:
    """The work of a process that writes something and ends."""

    work: Callable[[int], None]

    def __call__(self) -> None:
        self.work(seats.inherited[0])
        os._exit(0)


def _started(
    control: socket.socket, imports: Sequence[str], environment: Mapping[str, str], *, cold: bool
) -> psutil.Process:
    # 0: the server does not die with this process. Otherwise the kernel would kill it when this
    # thread ends.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    command = [sys.executable, *seats.flags(), "-P", "-m", "lockstep.launcher.fork_server"]
    options = [
        str(control.fileno()),
        str(parent),
        "cold" if cold else "warm",
        *([] if cold else imports),
    ]
    return psutil.Popen(
        [*command, *options],
        env=seats.with_huge_pages(environment),
        stdin=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
        start_new_session=True,
    )


def alike(environment: Mapping[str, str]) -> str:
    """Return what a launcher must have in common with a server that another process has started:
    flags, variables, and namespaces of the kernel.
    """
    namespaces = sorted(os.readlink(entry) for entry in Path("/proc/self/ns").iterdir())
    return json.dumps([seats.flags(), seats.acting(environment), namespaces])


def _served(environment: Mapping[str, str], control: socket.socket) -> psutil.Process | None:
    """Fork the server that `WARM` names. None if there is none, or if it cannot replace a server of
    this process's own.
    """
    path = environment.get(WARM)
    if path is None or environment.get(ALIKE) != alike(environment):
        return None
    with socket.socket(socket.AF_UNIX) as caller, suppress(OSError, psutil.NoSuchProcess):
        caller.connect(path)
        file = seats.anonymous_file()
        try:
            seats.write_whole(file, pickle.dumps(Seat(work=Serve(), environment=dict(environment))))
            socket.send_fds(caller, [b"."], [file, *_STREAMS, control.fileno()])
        finally:
            os.close(file)
        if said := caller.recv(32):
            return psutil.Process(int(said))
    return None


_servers: dict[tuple[object, ...], Server] = {}


def server(
    imports: Sequence[str] = FOR_SCRIPTS,
    environment: Mapping[str, str] | None = None,
    *,
    cold: bool = False,
) -> Server:
    """Return this process's server for ranks with this environment (default: this process's). Start
    it if there is none.
    """
    env = os.environ if environment is None else environment
    cold = cold or not seats.forks(env)
    key = cold, *seats.acting(env)
    found = _servers.pop(key, None)
    if found is not None and (found.owner != os.getpid() or not found.alive):
        found.close()
        found = None
    if found is None:
        if not _servers:
            atexit.register(close_all)
        _make_room()
        found = Server.start(imports, env, cold=cold)
    elif not cold:
        found.prepare(imports)
    _servers[key] = found  # the most recently used is last
    return found


def _make_room() -> None:
    """End the servers that were used longest ago, if there would be too many. A server for other
    launchers stays.
    """
    own = [key for key, each in _servers.items() if not each.stays]
    for key in own[: len(own) - _MOST_SERVERS + 1]:
        _servers.pop(key).close()


def pids() -> set[int]:
    """Return the pids of this process's servers, which run until it ends."""
    return {found.pid for found in _servers.values()}


def close_all() -> None:
    """End all servers of this process."""
    while _servers:
        _servers.popitem()[1].close()


def gpus() -> int:
    """Return the number of GPUs of this host that torch can use. A separate process asks torch,
    since asking may open them.
    """
    return int(server().answer(_count_gpus) or b"0")


def _count_gpus(descriptor: int) -> None:
    import torch

    os.write(
        descriptor, str(torch.cuda.device_count() if torch.cuda.is_available() else 0).encode()
    )
