"""Shares that move as a test says, in place of a Balancer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.data.balancer import Balancer, NewShares
from lockstep.data.loader import Loader


class Scripted(Balancer):
    """Before window number n, counted over all epochs, shares become `moves[n]`."""

    def __init__(self, slots: int, size: int, moves: Mapping[int, tuple[int, ...]]) -> None:
        super().__init__(slots, size)
        self._moves, self._window = moves, 0
        self.told: list[tuple[float, ...]] = []

    def begin(self) -> NewShares | None:
        window, self._window = self._window, self._window + 1
        if window not in self._moves:
            return None
        self.by_rank = self._moves[window]
        return NewShares(
            by_rank=self.by_rank, seconds=(1.0,) * len(self.by_rank), why="a test says so"
        )

    def note(self, seconds: Sequence[float]) -> None:
        self.told.append(tuple(seconds))


def scripted(loader: Loader, moves: Mapping[int, tuple[int, ...]]) -> Loader:
    """The loader, made with balance="auto", with these moves."""
    assert loader.balancer is not None
    loader.balancer = Scripted(loader.plan.slots, loader.size, moves)
    return loader
