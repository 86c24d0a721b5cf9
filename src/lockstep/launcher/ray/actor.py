"""The actor of a node: passes the driver's orders to the node's process, and what that says and
prints to the driver.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from queue import Empty, SimpleQueue

import lockstep
from lockstep.launcher.failures import signal_name
from lockstep.launcher.ray.job import Job

_PIECE = 2**16
_NOT_FOR_RANKS = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "PYTHONUNBUFFERED", "RAY_AUTH_TOKEN")
"""Ray sets the first to the CPUs of an actor, which has all ranks of its node, and the next two
for its own workers. The last opens the cluster.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the driver asks a node before it takes part."""

    versions: Mapping[str, str]
    seconds: float
    """Since the epoch, on this node's clock."""
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
    """Of a file's bytes; "" where there is none."""
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


class Node:
    """Of two groups of threads: one passes orders on, in their order, the other waits for what
    comes. First it says ("facts", Facts).
    """

    def __init__(self, folder: str, code: str | None, code_digest: str) -> None:
        """`folder`: the driver's, in which the file `code` has this digest."""
        self._said: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        facts = Facts(
            versions=versions(),
            seconds=time.time(),
            monotonic_ns=time.monotonic_ns(),
            same_code=Path(folder).is_dir() and (code is None or digest(Path(code)) == code_digest),
        )
        self._said.put(("facts", facts))

    def start(self, job: Job, address: str) -> None:
        """`address`: this node's, as the others reach it."""
        here, there = Pipe()
        environment = {
            name: value for name, value in os.environ.items() if name not in _NOT_FOR_RANKS
        }
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "lockstep.launcher.ray.node",
                str(there.fileno()),
                address,
            ],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        there.close()
        self._connection = here
        here.send(job)
        threading.Thread(target=self._listen, name="lockstep-node", daemon=True).start()

    def send(self, kind: str, content: object) -> None:
        self._connection.send((kind, content))

    def take(self, seconds: float) -> list[tuple[str, object]]:
        """What has been said since the last call, in its order; after at most `seconds`."""
        taken = []
        try:
            taken.append(self._said.get(timeout=seconds))
            while True:
                taken.append(self._said.get_nowait())
        except Empty:
            return taken

    def end(self) -> None:
        """End the node's process, and what it has started."""
        if self._process is not None:
            self.send("end", None)
            self._process.wait()

    def _listen(self) -> None:
        """What was printed before a message comes before it."""
        assert self._process is not None
        streams = {
            stream.fileno(): kind
            for kind, stream in (("out", self._process.stdout), ("err", self._process.stderr))
            if stream
        }
        for descriptor in streams:
            os.set_blocking(descriptor, False)
        while True:
            ready = wait([self._connection, *streams])
            for descriptor in [*streams]:
                while data := _read(descriptor):
                    self._said.put((streams[descriptor], data))
                if data is not None:
                    del streams[descriptor]  # its end
            if self._connection in ready:
                try:
                    self._said.put(self._connection.recv())
                except (EOFError, OSError):
                    break
        code = self._process.wait()
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        self._said.put(("gone", f"its launcher process has ended ({how})"))


def _read(descriptor: int) -> bytes | None:
    """None where there is nothing to read now."""
    try:
        return os.read(descriptor, _PIECE)
    except BlockingIOError:
        return None
