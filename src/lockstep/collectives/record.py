"""A line for every collective in this rank's log, where `--debug` asks for it.

    collective #12 all_reduce sum f32[1024] at train.py:71, 1024 elements, ranks 0-3: 0.35 ms

The time goes from the call to the return of the wait for it (on a GPU: until the stream has been
told to wait).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from lockstep.collectives.tags import listed
from lockstep.launcher.logs import COLLECTIVES

_OPEN = 256  # collectives that nobody has waited for; the oldest is written down without a time


class Record:
    """The collectives of one group, as this rank issues and ends them."""

    def __init__(self, file: str, ranks: Sequence[int]) -> None:
        self._end = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._ranks = listed(ranks)
        self._begun: dict[int, tuple[str, float]] = {}

    @classmethod
    def where_asked_for(cls, ranks: Sequence[int]) -> Record | None:
        """None unless the launcher's --debug has named a file."""
        file = os.environ.get(COLLECTIVES)
        return cls(file, ranks) if file else None

    def begin(self, number: int, text: str, elements: int) -> None:
        """Collective `number` has been called."""
        self._begun[number] = (
            f"collective #{number} {text}, {elements} elements, {self._ranks}",
            time.perf_counter(),
        )
        while len(self._begun) > _OPEN:
            self._unwaited(min(self._begun))

    def end(self, number: int) -> None:
        """Its result is there. A second call does nothing."""
        now = time.perf_counter()
        begun = self._begun.pop(number, None)
        if begun is not None:
            self._write(f"{begun[0]}: {1e3 * (now - begun[1]):.2f} ms")

    def close(self) -> None:
        """Write down what was never waited for."""
        for number in sorted(self._begun):
            self._unwaited(number)
        os.close(self._end)

    def _unwaited(self, number: int) -> None:
        begun = self._begun.pop(number, None)
        if begun is not None:
            self._write(f"{begun[0]}: not waited for")

    def _write(self, line: str) -> None:
        os.write(self._end, f"{line}\n".encode())
