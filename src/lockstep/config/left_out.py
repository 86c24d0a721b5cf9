"""The option `skip`: steps that a training leaves out. This file does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.errors import UsageError

_RANGE = re.compile(r"(\d{1,15})(?::(\d{1,15}))?")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Steps, counted from 1 over all epochs, in ascending ranges that do not touch."""

    ranges: tuple[range, ...] = ()

    @classmethod
    def of(cls, text: str | None) -> LeftOut:
        """Read `48209:48215,48300`: both ends of a range are left out. None: no step. Raises
        UsageError for other values.
        """
        parts = []
        for part in [] if text is None else text.split(","):
            match = _RANGE.fullmatch(part.strip())
            first = int(match[1]) if match else 0
            last = int(match[2] or match[1]) if match else 0
            if not 1 <= first <= last:
                expected = "steps from 1 on, such as 48209:48215 or 7,12:15"
                raise UsageError("wrong-value", name="skip", value=text, expected=expected)
            parts.append(range(first, last + 1))
        merged: list[range] = []
        for steps in sorted(parts, key=lambda steps: steps.start):
            if merged and steps.start <= merged[-1].stop:
                before = merged.pop()
                steps = range(before.start, max(before.stop, steps.stop))
            merged.append(steps)
        return cls(tuple(merged))

    def __contains__(self, step: object) -> bool:
        return any(step in steps for steps in self.ranges)

    def parts(self, steps: range, first: int) -> Iterator[tuple[range, bool]]:
        """Divide a range where it is left out and where not. Step 0 of `steps` has number `first`.

        Yields:
            A part of `steps`, and whether it is left out.
        """
        begin = steps.start
        for left_out in self.ranges:
            start = min(max(left_out.start - first, begin), steps.stop)
            stop = min(max(left_out.stop - first, start), steps.stop)
            if begin < start:
                yield range(begin, start), False
            if start < stop:
                yield range(start, stop), True
            begin = stop
        if begin < steps.stop:
            yield range(begin, steps.stop), False

    def until(self, last: int) -> LeftOut:
        """Return those that are not after step `last`."""
        clipped = []
        for steps in self.ranges:
            if steps.start <= last:
                clipped.append(range(steps.start, min(steps.stop, last + 1)))
        return LeftOut(tuple(clipped))

    def __str__(self) -> str:
        parts = []
        for steps in self.ranges:
            one = len(steps) == 1
            parts.append(str(steps.start) if one else f"{steps.start}:{steps.stop - 1}")
        return ",".join(parts)
