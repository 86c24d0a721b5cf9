"""What ranks print, on its way to the terminal: read from each rank's own pipes, joined (joined.py), written out.

    rank N   stdout -> rank-N.out, a FIFO in the run's directory      the launcher's thread -> stdout
             stderr -> rank-N.err                                                           -> stderr

The log files are not written here but by the ranks themselves: nothing is missing there when this process is killed.
Where the launcher's stream is a terminal rank 0 has it directly, so that colours, bars and a debugger work.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.launcher.joined import WINDOW, Joiner, Lines

_STREAMS = {"out": 1, "err": 2}
_READ = 2**16


@contextmanager
def forwarded(directory: Path, ranks: int, window: float = WINDOW) -> Iterator[None]:
    """While the block runs, print what ranks write to their pipes in `directory`; at its end, everything that is left in them.

    A line waits `window` seconds for the same line of other ranks, at most.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    forwarding = _Forwarding(directory, ranks, window)
    thread = threading.Thread(target=forwarding.run, name="lockstep-console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        forwarding.stop()
        thread.join()
        forwarding.close()


def connect(directory: Path, rank: int) -> None:
    """In a rank: have file descriptors 1 and 2 lead into its pipes, where the launcher has made them."""
    for name, descriptor in _STREAMS.items():
        path = pipe_of(directory, rank, name)
        if path.exists():
            end = os.open(path, os.O_WRONLY)
            os.dup2(end, descriptor)
            os.close(end)


def pipe_of(directory: Path, rank: int, stream: str) -> Path:
    """Where a rank's stream ("out" or "err") goes."""
    return directory / f"rank-{rank}.{stream}"


class _Forwarding:
    """The launcher's ends of all pipes, and the thread's loop."""

    def __init__(self, directory: Path, ranks: int, window: float) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._joiners = {name: Joiner(ranks, window) for name in _STREAMS}
        self._open = set(_STREAMS)  # streams of ours that somebody still reads
        for name, descriptor in _STREAMS.items():
            for rank in range(1 if os.isatty(descriptor) else 0, ranks):
                path = pipe_of(directory, rank, name)
                os.mkfifo(path, 0o600)
                # For writing too: the pipe then has no end as long as this process holds it, whoever comes and goes.
                end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                self._selector.register(end, selectors.EVENT_READ, (rank, name, Lines()))

    def run(self) -> None:
        """Until stopped: read, join, write. Then what is left."""
        stopped = False
        while not stopped:
            stopped = self._read(self._seconds())
            self._print_ready()
        for key in self._pipes():
            while self._take(key):
                pass
        for key in self._pipes():
            rank, name, lines = key.data
            for line in lines.end():
                self._print(name, self._joiners[name].take(rank, line, time.monotonic()))
        for name, joiner in self._joiners.items():
            self._print(name, joiner.end())

    def stop(self) -> None:
        os.write(self._waker, b"x")

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._waker)

    def _pipes(self) -> list[selectors.SelectorKey]:
        return [key for key in self._selector.get_map().values() if key.data is not None]

    def _seconds(self) -> float | None:
        due = [when for joiner in self._joiners.values() if (when := joiner.due()) is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _read(self, seconds: float | None) -> bool:
        """Take in what is there, waiting for it up to `seconds`; True when asked to stop."""
        stopped = False
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                stopped = True
            else:
                self._take(key)
        return stopped

    def _take(self, key: selectors.SelectorKey) -> bool:
        """Read from one pipe once; False if it is empty."""
        rank, name, lines = key.data
        try:
            data = os.read(key.fd, _READ)
        except BlockingIOError:
            return False
        now = time.monotonic()
        for line in lines.feed(data):
            self._print(name, self._joiners[name].take(rank, line, now))
        return bool(data)

    def _print_ready(self) -> None:
        now = time.monotonic()
        for name, joiner in self._joiners.items():
            self._print(name, joiner.ready(now))

    def _print(self, name: str, lines: list[str]) -> None:
        """Nobody who reads any more ends the printing, not the run."""
        if not lines or name not in self._open:
            return
        data = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        try:
            write_all(_STREAMS[name], data)
        except OSError:
            self._open.discard(name)


def write_all(descriptor: int, data: bytes) -> None:
    """Write it whole, also where the descriptor has been made non-blocking by whoever shares it."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
