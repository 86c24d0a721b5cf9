"""SLURM's short writing of host names, expanded: `n[01-03,07]` is n01, n02, n03 and n07. Pure.

`scontrol show hostnames` does the same, but is not there in every container, and costs a process in every rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from lockstep.errors import UsageError

_PART = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<text>[^\[\],\s]+)")
_RANGE = re.compile(r"(?P<low>\d+)(-(?P<high>\d+))?")


def hosts(nodelist: str) -> Iterator[str]:
    """The hosts that `nodelist` names, in its order, one at a time: asking for the first of 10,000 costs nothing.

    Known are `a1`, `a1,b2`, `n[01-03,07]` (the width of the first number counts), several brackets as in `rack[1-2]n[1-4]`, of which the
    last moves fastest, and text behind them as in `n[1-2].cluster`. Raises UsageError for anything else.
    """
    entries = list(_entries(nodelist))
    if not entries:
        raise UsageError(f"nodelist {nodelist!r} names no host: it is written as in n[01-03,07],b2")
    return itertools.chain.from_iterable(map(_expanded, entries))


def first_host(nodelist: str) -> str:
    """Where rank 0 of a job runs that has `nodelist`."""
    return next(hosts(nodelist))


def _entries(nodelist: str) -> Iterator[list[list[str]]]:
    """For each comma-separated entry its parts, each a list of what may stand there."""
    parts: list[list[str]] = []
    position = 0
    while position < len(nodelist):
        if nodelist[position] == ",":
            if parts:
                yield parts
            parts = []
            position += 1
            continue
        found = _PART.match(nodelist, position)
        if found is None:
            raise UsageError(f"nodelist {nodelist!r} cannot be read from {nodelist[position:]!r} on: it is written as in n[01-03,07],b2")
        parts.append([found["text"]] if found["text"] is not None else _written(found["ranges"], nodelist))
        position = found.end()
    if parts:
        yield parts


def _written(ranges: str, nodelist: str) -> list[str]:
    """`01-03,07` as 01, 02, 03, 07."""
    numbers: list[str] = []
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        low, high = (found["low"], found["high"] or found["low"]) if found else ("1", "0")
        if int(low) > int(high):
            raise UsageError(f"nodelist {nodelist!r}: {each!r} is no range of numbers; it is written as in n[01-03,07],b2")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def _expanded(parts: list[list[str]]) -> Iterator[str]:
    return map("".join, itertools.product(*parts))
