"""Forward what ranks print to the terminal: read each rank's pipes, join equal lines, write them.

A line that several ranks print at about the same time is written once: `[0-7] text`.

    rank N   stdout -> rank-N.out, a FIFO in the run's directory   the launcher's thread -> stdout
             stderr -> rank-N.err                                                        -> stderr

In a notebook the thread writes to the cell, and also shows each rank's unfinished line there.

The ranks themselves write the log files, so these are complete even if this process is killed. If
the launcher's stream is a terminal, the host's first rank writes to it directly, so that colours,
bars and a debugger work.
"""

from __future__ import annotations

import os
import re
import selectors
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.launcher.notebook import Cell
from lockstep.runtime.disk import write_all

_STREAMS = {"out": 1, "err": 2}
_READ = 2**16
WINDOW = 0.1
"""Maximum seconds that a line waits for the same line of other ranks."""
_REDRAW = 0.2  # seconds between two updates of a cell's display
_LONGEST = 2**16  # maximum bytes of a line; a longer one is split
_MOST = 200  # maximum number of waiting lines; beyond it the first is printed at once
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@contextmanager
def forwarded(
    directory: Path, ranks: range, window: float = WINDOW, cell: Cell | None = None
) -> Iterator[None]:
    """In the block, print what ranks write to their pipes in `directory`; at its end, print
    everything left in them.

    A line waits at most `window` seconds for the same line of other ranks. `cell`: print there.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    forwarding = _Forwarding(directory, ranks, window, cell)
    thread = threading.Thread(target=forwarding.run, name="lockstep-console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        forwarding.stop()
        thread.join()
        forwarding.close()


def connect(directory: Path, rank: int) -> None:
    """In a rank: connect file descriptors 1 and 2 to its pipes, if the launcher has made them."""
    for name, descriptor in _STREAMS.items():
        path = pipe_of(directory, rank, name)
        if path.exists():
            end = os.open(path, os.O_WRONLY)
            os.dup2(end, descriptor)
            os.close(end)


def pipe_of(directory: Path, rank: int, stream: str) -> Path:
    """Return the path of the pipe for a rank's stream ("out" or "err")."""
    return directory / f"rank-{rank}.{stream}"


class _Forwarding:
    """The launcher's ends of all pipes, and the loop of its thread."""

    def __init__(self, directory: Path, ranks: range, window: float, cell: Cell | None) -> None:
        self._cell, self._redraw_at = cell, 0.0
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._joiners = {name: Joiner(len(ranks), window) for name in _STREAMS}
        self._open = set(_STREAMS)  # streams of this process that still have a reader
        for name, descriptor in _STREAMS.items():
            for rank in ranks[1 if cell is None and os.isatty(descriptor) else 0 :]:
                path = pipe_of(directory, rank, name)
                os.mkfifo(path, 0o600)
                # Opened for writing too: then the pipe has no end of file as long as this process
                # holds it, whichever ranks open and close it.
                end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                self._selector.register(end, selectors.EVENT_READ, (rank, name, Lines()))

    def run(self) -> None:
        """Read, join and print until stopped. Then print what is left."""
        pipes = [key for key in self._selector.get_map().values() if key.data is not None]
        stopped = False
        while not stopped:
            due = [when for joiner in self._joiners.values() if (when := joiner.due()) is not None]
            due += self._redraw(pipes)
            for key, _ in self._selector.select(
                max(0.0, min(due) - time.monotonic()) if due else None
            ):
                stopped = stopped or key.data is None
                if key.data is not None:
                    self._take(key)
            for name, joiner in self._joiners.items():
                self._print(name, joiner.ready(time.monotonic()))
        for key in pipes:
            while self._take(key):
                pass
        for rank, name, lines in (key.data for key in pipes):
            self._join(rank, name, lines.end())
        for name, joiner in self._joiners.items():
            self._print(name, joiner.end())
        self._redraw_at = 0.0
        self._redraw(pipes)

    def stop(self) -> None:
        os.write(self._waker, b"x")

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._waker)

    def _take(self, key: selectors.SelectorKey) -> bool:
        """Read from one pipe once; False if it is empty."""
        rank, name, lines = key.data
        try:
            data = os.read(key.fd, _READ)
        except BlockingIOError:
            return False
        self._join(rank, name, lines.feed(data))
        return bool(data)

    def _redraw(self, pipes: Iterable[selectors.SelectorKey]) -> list[float]:
        """Show the ranks' unfinished lines in the cell. Return the time of the next update, if
        there is one.
        """
        if self._cell is None:
            return []
        states = (key.data for key in pipes)
        unended = {rank: text for rank, _, lines in states if (text := lines.unended)}
        now = time.monotonic()
        if not unended and not self._cell.shown:
            self._redraw_at = now + _REDRAW  # a line that ends by then is not shown twice
            return []
        if now >= self._redraw_at:
            self._cell.show(unended)
            self._redraw_at = now + _REDRAW
        return [self._redraw_at]

    def _join(self, rank: int, name: str, lines: list[str]) -> None:
        now = time.monotonic()
        for line in lines:
            self._print(name, self._joiners[name].take(rank, line, now))

    def _print(self, name: str, lines: list[str]) -> None:
        """Print `lines`. If the stream has lost its reader, only the printing ends, not the run."""
        if not lines or name not in self._open:
            return
        text = "".join(f"{line}\n" for line in lines)
        try:
            if self._cell is None:
                write_all(_STREAMS[name], text.encode(errors="replace"))
            else:
                self._cell.write(f"std{name}", text)
        except OSError:
            self._open.discard(name)


class Lines:
    """One rank's bytes, split into lines. Of a line that was redrawn (\\r) only the last version
    counts.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        while len(rest) > _LONGEST:
            whole.append(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        self._rest = rest
        return [_shown(line) for line in whole]

    @property
    def unended(self) -> str:
        """The unfinished line."""
        return _shown(self._rest)

    def end(self) -> list[str]:
        """Return the unfinished line, if there is one."""
        rest, self._rest = _shown(self._rest), b""
        return [rest] if rest else []


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


@dataclass(slots=True, eq=False)
class _Said:
    text: str
    key: str
    ranks: list[int]
    since: float


class Joiner:
    """Joins equal lines of different ranks that arrive within the window. Each rank's own lines
    keep their order.

    No line waits longer than the window, and at most `_MOST` lines wait.
    """

    def __init__(self, ranks: int, window: float = WINDOW) -> None:
        self._count, self._window = ranks, window
        self._waiting: list[_Said] = []
        self._latest: dict[int, _Said] = {}  # by rank: its last waiting line

    def take(self, rank: int, line: str, now: float) -> list[str]:
        """Take a line. Return the lines to print because too many are waiting."""
        key = _COLOUR.sub("", line)
        begin = self._waiting.index(self._latest[rank]) + 1 if rank in self._latest else 0
        said = next((each for each in self._waiting[begin:] if each.key == key), None)
        if said is None:
            # Insert it right after this rank's last line, not at the end: then this rank's next
            # lines can still be joined with lines that others have printed since.
            said = _Said(line, key, [rank], now)
            self._waiting.insert(begin, said)
        else:
            said.ranks.append(rank)
            if rank == min(said.ranks):
                said.text = line
        self._latest[rank] = said
        return self._leave(1) if len(self._waiting) > _MOST else []

    def ready(self, now: float) -> list[str]:
        """Return the lines whose time has come, the lines before them, and lines that all ranks
        have printed.
        """
        late = [
            place for place, said in enumerate(self._waiting, 1) if said.since + self._window <= now
        ]
        count = late[-1] if late else 0
        while count < len(self._waiting) and len(self._waiting[count].ranks) == self._count:
            count += 1
        return self._leave(count)

    def due(self) -> float | None:
        """Return the time to ask again; None if nothing waits."""
        return min(said.since for said in self._waiting) + self._window if self._waiting else None

    def end(self) -> list[str]:
        """Return all waiting lines."""
        return self._leave(len(self._waiting))

    def _leave(self, count: int) -> list[str]:
        gone, self._waiting = self._waiting[:count], self._waiting[count:]
        for rank in [rank for rank, said in self._latest.items() if said in gone]:
            del self._latest[rank]
        return [f"[{spans(said.ranks)}] {said.text}".rstrip() for said in gone]


def spans(ranks: Iterable[int]) -> str:
    """Write ranks as `0-7`, `3` or `0,2-5`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
