"""Forward what ranks print to the terminal: read each rank's pipes, join equal lines, write them.

A line that several ranks print at about the same time is written once: `[0-7] text`.

    rank N   stdout -> pipe -> the launcher's thread -> stdout
             stderr -> pipe ->                       -> stderr

In a notebook the thread writes to the cell, and also shows each rank's unfinished line there.

The ranks themselves write the log files, so these are complete even if this process is killed. If
the launcher's stream is a terminal, the host's first rank writes to it directly, so that colours,
bars and a debugger work.
"""

from __future__ import annotations

import os
import re
import resource
import selectors
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.launcher.notebook import Cell
from lockstep.runtime.disk import write_all
from lockstep.runtime.streams import spans

_STREAMS = {"out": 1, "err": 2}
_PER_RANK = 2 * len(_STREAMS)  # descriptors: both ends of its pipes
_READ = 2**16
WINDOW = 0.1
"""Maximum seconds that a line waits for the same line of other ranks."""
_REDRAW = 0.2  # seconds between two updates of a cell's display
_LONGEST = 2**16  # maximum bytes of a line; a longer one is split
_MOST = 200  # maximum number of waiting lines; beyond it the first is printed at once
COLOUR = re.compile(r"\x1b\[[\d;]*m")


@contextmanager
def forwarded(
    ranks: range, window: float = WINDOW, cell: Cell | None = None
) -> Iterator[Mapping[int, Sequence[int]]]:
    """In the block, print what ranks write to their pipes; at its end, print everything left in
    them. Yields each rank's standard streams, as descriptors of this process.

    A line waits at most `window` seconds for the same line of other ranks. `cell`: print there.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    forwarding = _Forwarding(ranks, window, cell)
    thread = threading.Thread(target=forwarding.run, name="lockstep-console", daemon=True)
    thread.start()
    try:
        yield forwarding.streams
    finally:
        forwarding.stop()
        thread.join()
        forwarding.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Pipe:
    """One rank's pipe. The launcher holds both ends: then there is no end of file, whichever
    processes of the rank open and close it.
    """

    reading: int
    writing: int
    rank: int
    stream: str
    lines: Lines


class _Forwarding:
    """The launcher's ends of all pipes, and the loop of its thread."""

    def __init__(self, ranks: range, window: float, cell: Cell | None) -> None:
        self._cell = cell
        self._redraw_at = 0.0
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        _allow_files(_PER_RANK * len(ranks))
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._joiners = {stream: Joiner(len(ranks), window) for stream in _STREAMS}
        self._open = set(_STREAMS)  # streams of this process that still have a reader
        self._pipes: list[_Pipe] = []
        self.streams = {rank: [0, 1, 2] for rank in ranks}
        """Each rank's standard streams."""
        for stream, descriptor in _STREAMS.items():
            writes_directly = cell is None and os.isatty(descriptor)
            for rank in ranks[1:] if writes_directly else ranks:
                pipe = _Pipe(*os.pipe(), rank, stream, Lines())
                os.set_blocking(pipe.reading, False)
                self._pipes.append(pipe)
                self._selector.register(pipe.reading, selectors.EVENT_READ, pipe)
                self.streams[rank][descriptor] = pipe.writing

    def run(self) -> None:
        """Read, join and print until stopped. Then print what is left."""
        stopped = False
        while not stopped:
            for key, _ in self._selector.select(self._seconds_to_wait()):
                if key.data is None:
                    stopped = True
                else:
                    self._read(key.data)
            for stream, joiner in self._joiners.items():
                self._print(stream, joiner.ready(time.monotonic()))
        for pipe in self._pipes:
            while self._read(pipe):
                pass
        for pipe in self._pipes:
            self._join(pipe, pipe.lines.end())
        for stream, joiner in self._joiners.items():
            self._print(stream, joiner.end())
        self._redraw_at = 0.0
        self._redraw()

    def stop(self) -> None:
        os.write(self._waker, b"x")

    def close(self) -> None:
        self._selector.close()
        for pipe in self._pipes:
            os.close(pipe.reading)
            os.close(pipe.writing)
        os.close(self._wake)
        os.close(self._waker)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limit)

    def _seconds_to_wait(self) -> float | None:
        """Redraw the cell if it is time. Return when a line or the cell is due; None if nothing
        waits.
        """
        times = [self._redraw()]
        times += [joiner.due() for joiner in self._joiners.values()]
        due = [moment for moment in times if moment is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _read(self, pipe: _Pipe) -> bool:
        """Read from one pipe once; False if it is empty."""
        try:
            data = os.read(pipe.reading, _READ)
        except BlockingIOError:
            return False
        self._join(pipe, pipe.lines.feed(data))
        return bool(data)

    def _redraw(self) -> float | None:
        """Show the ranks' unfinished lines in the cell. Return the time of the next update, if
        there is one.
        """
        if self._cell is None:
            return None
        unended = {pipe.rank: pipe.lines.unended for pipe in self._pipes if pipe.lines.unended}
        now = time.monotonic()
        if not unended and not self._cell.shown:
            self._redraw_at = now + _REDRAW  # a line that ends by then is not shown twice
            return None
        if now >= self._redraw_at:
            self._cell.show(unended)
            self._redraw_at = now + _REDRAW
        return self._redraw_at

    def _join(self, pipe: _Pipe, lines: list[str]) -> None:
        now = time.monotonic()
        for line in lines:
            self._print(pipe.stream, self._joiners[pipe.stream].add(pipe.rank, line, now))

    def _print(self, stream: str, lines: list[str]) -> None:
        """Print `lines`. If the stream has lost its reader, only the printing ends, not the run."""
        if not lines or stream not in self._open:
            return
        text = "".join(f"{line}\n" for line in lines)
        try:
            if self._cell is None:
                write_all(_STREAMS[stream], text.encode(errors="replace"))
            else:
                self._cell.write(f"std{stream}", text)
        except OSError:
            self._open.discard(stream)


class Lines:
    """One rank's bytes, split into lines. Of a line that was redrawn (\\r) only the last version
    counts.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        *lines, rest = (self._rest + data).split(b"\n")
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        while len(rest) > _LONGEST:
            lines.append(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        self._rest = rest
        return [_last_version(line) for line in lines]

    @property
    def unended(self) -> str:
        """The unfinished line."""
        return _last_version(self._rest)

    def end(self) -> list[str]:
        """Return the unfinished line, if there is one."""
        line = self.unended
        self._rest = b""
        return [line] if line else []


def _last_version(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


@dataclass(slots=True, eq=False)
class _JoinedLine:
    text: str
    key: str
    """The text without colours."""
    ranks: list[int]
    since: float


class Joiner:
    """Joins equal lines of different ranks that arrive within the window. Each rank's own lines
    keep their order.

    No line waits longer than the window, and at most `_MOST` lines wait.
    """

    def __init__(self, ranks: int, window: float = WINDOW) -> None:
        self._count = ranks
        self._window = window
        self._waiting: list[_JoinedLine] = []
        self._latest: dict[int, _JoinedLine] = {}  # by rank: its last waiting line

    def add(self, rank: int, text: str, now: float) -> list[str]:
        """Add a rank's line. Return the lines to print because too many are waiting."""
        key = COLOUR.sub("", text)
        start = self._waiting.index(self._latest[rank]) + 1 if rank in self._latest else 0
        equal = [line for line in self._waiting[start:] if line.key == key]
        if equal:
            line = equal[0]
            if rank < min(line.ranks):
                line.text = text
            line.ranks.append(rank)
        else:
            # Insert it right after this rank's last line, not at the end: then this rank's next
            # lines can still be joined with lines that others have printed since.
            line = _JoinedLine(text, key, [rank], now)
            self._waiting.insert(start, line)
        self._latest[rank] = line
        return self._remove(1) if len(self._waiting) > _MOST else []

    def ready(self, now: float) -> list[str]:
        """Return the lines whose time has come, the lines before them, and lines that all ranks
        have printed.
        """
        count = 0
        for number, line in enumerate(self._waiting, 1):
            late = line.since + self._window <= now
            if late or (number == count + 1 and len(line.ranks) == self._count):
                count = number
        return self._remove(count)

    def due(self) -> float | None:
        """Return the time to ask again; None if nothing waits."""
        oldest = min((line.since for line in self._waiting), default=None)
        return None if oldest is None else oldest + self._window

    def end(self) -> list[str]:
        """Return all waiting lines."""
        return self._remove(len(self._waiting))

    def _remove(self, count: int) -> list[str]:
        removed = self._waiting[:count]
        del self._waiting[:count]
        for line in removed:
            for rank in line.ranks:
                if self._latest[rank] is line:
                    del self._latest[rank]
        return [f"[{spans(line.ranks)}] {line.text}".rstrip() for line in removed]


def _allow_files(count: int) -> None:
    """Let this process open `count` more files than it may now, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + count
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
