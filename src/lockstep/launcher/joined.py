"""Lines of several ranks in, fewer lines out: what several ranks say within a moment is said once, `[0-7] text`.

Pure: no file, no clock, no terminal. forward.py reads from the ranks, and prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW = 0.1
"""Seconds that a line waits for the same line of other ranks, at most."""
_LONGEST = 2**16  # bytes of a line without an end; what is longer comes in pieces
_MOST = 200  # lines that wait; with more the first go at once
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Lines:
    """One rank's bytes, cut into lines. Of a line that was redrawn (\\r) only the last version counts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        while len(rest) > _LONGEST:
            whole.append(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        self._rest = rest
        return [_shown(line) for line in whole]

    def end(self) -> list[str]:
        """What is left without an end, as a line."""
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
    """Joins equal lines of different ranks that come within the window. The order of each rank's own lines is kept.

    Nothing waits longer than the window, and no more than `_MOST` lines wait, whatever comes.
    """

    def __init__(self, ranks: int, window: float = WINDOW) -> None:
        self._count, self._window = ranks, window
        self._waiting: list[_Said] = []
        self._latest: dict[int, _Said] = {}  # of each rank: its last line that waits

    def take(self, rank: int, line: str, now: float) -> list[str]:
        """Hear a line; returns what has to be printed because too much is waiting."""
        key = _COLOUR.sub("", line)
        begin = self._waiting.index(self._latest[rank]) + 1 if rank in self._latest else 0
        said = next((each for each in self._waiting[begin:] if each.key == key), None)
        if said is None:
            # Right behind this rank's last line and not at the end: what others have said since can still be joined by its next lines.
            said = _Said(line, key, [rank], now)
            self._waiting.insert(begin, said)
        else:
            said.ranks.append(rank)
            if rank == min(said.ranks):
                said.text = line
        self._latest[rank] = said
        return self._leave(1) if len(self._waiting) > _MOST else []

    def ready(self, now: float) -> list[str]:
        """The lines whose time has come, those before them, and what all ranks have said."""
        late = [place for place, said in enumerate(self._waiting, 1) if now - said.since >= self._window]
        count = late[-1] if late else 0
        while count < len(self._waiting) and len(self._waiting[count].ranks) == self._count:
            count += 1
        return self._leave(count)

    def due(self) -> float | None:
        """When to ask again; None while nothing waits."""
        return min(said.since for said in self._waiting) + self._window if self._waiting else None

    def end(self) -> list[str]:
        """Everything that waits."""
        return self._leave(len(self._waiting))

    def _leave(self, count: int) -> list[str]:
        gone, self._waiting = self._waiting[:count], self._waiting[count:]
        for rank in [rank for rank, said in self._latest.items() if said in gone]:
            del self._latest[rank]
        return [f"[{spans(said.ranks)}] {said.text}".rstrip() for said in gone]


def spans(ranks: Iterable[int]) -> str:
    """`0-7`, `3`, `0,2-5`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
