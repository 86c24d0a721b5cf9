"""From the files of a run directory to an `Anatomy`: torn lines, missing ranks and restarts are told, never raised."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.anatomy.generation import Anatomy, Lane, join
from lockstep.anatomy.lines import Begin, Line, parse

FOLDER = "anatomy"
_OPENING = '{"kind":'
_FILE = re.compile(r"rank-(\d+)\.jsonl")


def read(run: Path) -> Anatomy | None:
    """Of the run directory `run`; None where no rank has left one."""
    lanes: dict[int, list[Lane]] = {}
    unread: dict[int, int] = {}
    for file in sorted((run / FOLDER).glob("rank-*.jsonl")):
        match = _FILE.fullmatch(file.name)
        if match is None:
            continue
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # told as a missing rank
        rank = int(match[1])
        found, damaged = _lanes(text, rank)
        if found:
            lanes[rank] = found
        if damaged:
            unread[rank] = damaged
    generations = join(lanes)
    return Anatomy(generations=generations, unread=unread) if generations else None


def _lanes(text: str, rank: int) -> tuple[list[Lane], int]:
    """A file's lanes, and how many of its lines could not be read. Half a line at the very end is what a killed process leaves."""
    whole, _, _ = text.rpartition("\n")
    lines = [line for each in whole.splitlines() if each.strip() for line in _parsed(each)]
    starts = [place for place, line in enumerate(lines) if isinstance(line, Begin) and line.rank == rank]
    ends = [*starts, len(lines)][1:]
    lanes = []
    for start, end in zip(starts, ends, strict=True):
        begin = lines[start]
        assert isinstance(begin, Begin)
        lanes.append(Lane.of(begin, _ours(lines[start + 1 : end])))
    return lanes, lines.count(None)


def _parsed(text: str) -> list[Line | None]:
    """The line; or what a rank wrote that was started again behind half a line of the one that was killed: the half is damage, the rest counts."""
    line = parse(text)
    again = text.rfind(_OPENING)
    return [line] if line is not None or again <= 0 else [None, parse(text[again:])]


def _ours(lines: list[Line | None]) -> list[Line]:
    return [line for line in lines if line is not None]
