"""The actor of a node. It passes the driver's orders to the node's process, and that process's
messages and output to the driver.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.metadata import version
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from queue import Empty, SimpleQueue

import lockstep
from lockstep.config.launching import Launch
from lockstep.launcher.failures import signal_name
from lockstep.launcher.fork_server import Variables
from lockstep.launcher.logs import Console
from lockstep.launcher.rank import Target

_PIECE = 2**16
_NOT_FOR_RANKS = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "PYTHONUNBUFFERED", "RAY_AUTH_TOKEN")
"""Variables that ranks must not inherit. Ray sets the first to the number of CPUs of an actor,
which has all ranks of its node. Ray sets the next two for its own workers. The last opens the
cluster.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What the driver asks a node before the node takes part."""

    versions: Mapping[str, str]
    seconds: float
    """The time since the epoch, on this node's clock."""
    monotonic_ns: int
    same_code: bool
    """Whether the driver's folder is here too, with the same task or script in it."""


def versions() -> dict[str, str]:
    return {
        "lockstep": lockstep.__version__,
        "torch": version("torch"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def digest(file: Path) -> str:
    """Return the SHA-256 of a file's bytes; "" if there is no file."""
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


class Node:
    """The actor. It has two groups of threads: one passes orders on, in their order, and the other
    waits for messages. First it reports ("facts", NodeFacts).
    """

    def __init__(self, folder: str, code: str, code_digest: str) -> None:
        """`folder` is the driver's, and there the file `code` has this digest. Without a file they
        are "." and "".
        """
        self._messages: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        facts = NodeFacts(
            versions=versions(),
            seconds=time.time(),
            monotonic_ns=time.monotonic_ns(),
            same_code=Path(folder).is_dir() and digest(Path(code)) == code_digest,
        )
        self._messages.put(("facts", facts))

    def start(self, job: Job, address: str) -> None:
        """Start the node's process. `address`: this node's, as the others reach it."""
        local, remote = Pipe()
        environment = {
            name: value for name, value in os.environ.items() if name not in _NOT_FOR_RANKS
        }
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "lockstep.launcher.ray.node",
                str(remote.fileno()),
                address,
            ],
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        remote.close()
        self._connection = local
        local.send(job)
        threading.Thread(target=self._listen, name="lockstep-node", daemon=True).start()

    def send(self, kind: str, content: object) -> None:
        self._connection.send((kind, content))

    def receive(self, seconds: float) -> list[tuple[str, object]]:
        """Return the messages since the last call, in their order; after at most `seconds`."""
        messages = []
        with suppress(Empty):
            messages.append(self._messages.get(timeout=seconds))
            while True:
                messages.append(self._messages.get_nowait())
        return messages

    def end(self) -> None:
        """End the node's process, and what it has started."""
        if self._process is not None:
            self.send("end", None)
            self._process.wait()

    def _listen(self) -> None:
        """Queue the process's messages and output. What was printed before a message comes before
        it.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        streams = {self._process.stdout.fileno(): "out", self._process.stderr.fileno(): "err"}
        for descriptor in streams:
            os.set_blocking(descriptor, False)
        while True:
            ready = wait([self._connection, *streams])
            for descriptor, kind in list(streams.items()):
                while data := _read(descriptor):
                    self._messages.put((kind, data))
                if data is not None:
                    del streams[descriptor]  # end of file
            if self._connection in ready:
                try:
                    self._messages.put(self._connection.recv())
                except (EOFError, OSError):
                    break
        code = self._process.wait()
        reason = signal_name(-code) if code < 0 else f"exit code {code}"
        self._messages.put(("gone", f"its launcher process has ended ({reason})"))


def _read(descriptor: int) -> bytes | None:
    """Read what there is; None if there is nothing to read now."""
    try:
        return os.read(descriptor, _PIECE)
    except BlockingIOError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PickledCall:
    """A function that every rank calls, in place of a program. Its results go to the driver,
    pickled.
    """

    pickled: bytes
    """The function and its arguments. Only ranks and the driver import the modules that unpickling
    needs, because that takes seconds.
    """
    imports: Sequence[str]
    variables: Sequence[Variables] | None = None
    """The variables of each rank, if ranks have their own: then each is a fresh interpreter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The description of the whole run, the same for all nodes."""

    cluster: str
    """The cluster's address."""
    least: int
    most: int
    """Ranks over all nodes."""
    each: int | None = None
    """Maximum ranks per node."""
    gpus: bool | None = None
    """Whether each rank takes a GPU, or a CPU; None: a GPU where the cluster has one."""
    restarts: int = 0

    target: Target
    call: PickledCall | None = None
    environment: Variables
    """Variables for ranks. They replace the node's own."""
    folder: str
    """The folder in which ranks work; relative paths of `target` begin here. "" if a node lacks it:
    then ranks work in the actor's folder, to which Ray has brought the code.
    """
    code: Path | None = None
    """The file of the task or script."""
    console: Console
    logs: Path | None = None
    mark: tuple[str, str] | None = None
    """A file in the run directory, and its text, which the driver has written: all nodes must see
    it.
    """
    wanted: Path | None = None
    """A file that the driver creates once more nodes are ready: ranks end at the next checkpoint.
    """
    grow: Path | None = None
    """A file that exists if the ranks have ended for that reason."""
    launch: Launch = field(default_factory=Launch)
    heeds: bool = False
    """Whether ranks save and exit when they are asked to stop."""

    @property
    def elastic(self) -> bool:
        return self.least < self.most and self.wanted is not None

    @property
    def brought(self) -> Path:
        """The folder that Ray brings to a node which has no folder in common with the driver."""
        return Path(self.folder) if self.code is None else self.code.parent

    def without_folder(self) -> Job:
        """Return the job for such nodes."""
        if self.code is None:
            return replace(self, folder="")
        name = self.code.name
        if self.target.script is not None:
            target = replace(self.target, script=name)
        else:
            target = replace(self.target, args=[*self.target.args, name], task=name)
        return replace(self, folder="", target=target)
