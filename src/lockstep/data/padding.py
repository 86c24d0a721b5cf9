"""Copies of micro-batches, for loops in which all ranks must have equally many in a step: what they
gather of each would else wait for ever. A copy counts nothing.
"""

from __future__ import annotations

from typing import Any

from lockstep.data.window_loader import WindowLoader
from lockstep.data.windows import Cut, Window
from lockstep.errors import UsageError


class Padding:
    """What a rank with fewer micro-batches of a step than others computes instead: its latest one of
    the step, or rank 0's; with a stream, its latest one.

    Args:
        loader: yields the windows.
    """

    def __init__(self, loader: WindowLoader[Any]) -> None:
        self._rank = loader.rank
        self._size = loader.size
        self._latest: tuple[Any, int] | None = None

    def most(self, cut: Cut) -> int:
        """Return the most micro-batches of a step that a rank has."""
        return max(len(cut.filled(rank, self._size)) for rank in range(self._size))

    def begin(self, window: Window) -> None:
        """Begin a step."""
        if window.read is not None:  # it can read rank 0's
            self._latest = None

    def note(self, batch: Any, slot: int) -> None:
        """Note this rank's latest micro-batch, and its slot."""
        self._latest = batch, slot

    def copy(self, window: Window) -> tuple[Any, int]:
        """Return the batch to compute, and the slot of its original."""
        if self._latest is None:
            if window.read is None:
                raise UsageError("rank-without-batches", rank=self._rank, size=self._size)
            self._latest = window.turned(self._size - self._rank, self._rank, self._size)[0], 0
        return self._latest
