"""A collective algorithm as data: which rank sends which piece to which rank, round by round.

    ring all-reduce of 4 ranks, 4 cells

    round 1, three times, the cell going down by one each time: the receiver adds
        0 -> 1 cell 0   1 -> 2 cell 1   2 -> 3 cell 2   3 -> 0 cell 3
    round 2, three times, likewise: the receiver replaces
        0 -> 1 cell 1   1 -> 2 cell 2   2 -> 3 cell 3   3 -> 0 cell 0

The tensor is cut into `cells`. The transfers of a round run at the same time: each reads what its
sender held before the round. A repeated round moves its cells by `shift` each time, so a ring is
two rounds with 4 ranks and with 65,536. Five modules read this description: prove.py checks it,
over_processes.py runs it between processes, in_process.py runs it in one process, network.py times
it, and tools/show/schedule_picture.py draws it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Kind = Literal[
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "scatter",
    "gather",
    "all_to_all",
]
"""A collective."""
Ranks = NDArray[np.int64]
REDUCING: tuple[Kind, ...] = ("all_reduce", "reduce", "reduce_scatter")
"""The collectives that add up what the ranks have."""


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Transfers that run at the same time. Transfer i sends `count[i]` cells, from `cell[i]` on,
    from rank `src[i]` to rank `dst[i]`. After the last cell comes the first.

    The receiver adds the cells to what it holds (`reduce`), or replaces what it holds. The round
    runs `repeat` times, each time with cells that are `shift` further.
    """

    src: Ranks
    dst: Ranks
    cell: Ranks
    count: Ranks
    reduce: bool
    repeat: int = 1
    shift: int = 0

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of one round, for callers that need the messages one by one."""

    src: int
    dst: int
    cells: tuple[int, ...]
    reduce: bool


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """An algorithm `name` for the collective `kind` among `world` ranks, over `cells` pieces; with
    `root` if the kind has one.
    """

    name: str
    kind: Kind
    world: int
    cells: int
    rounds: tuple[Round, ...]
    root: int = 0

    def __len__(self) -> int:
        """Return the number of rounds, counting repeats."""
        return sum(round_.repeat for round_ in self.rounds)

    def transfers(self) -> Iterator[list[Transfer]]:
        """Yield the transfers of every round, counting repeats."""
        for round_ in self.rounds:
            for turn in range(round_.repeat):
                yield [self._transfer(round_, index, turn) for index in range(len(round_))]

    @property
    def reducing(self) -> bool:
        """Whether the collective adds up what the ranks have."""
        return self.kind in REDUCING

    def cells_before(self, rank: int) -> range | list[int]:
        """Return the cells in which a rank has content before the collective."""
        return held_before(self.kind, self.world, rank, self.root, self.cells)

    def cells_after(self, rank: int) -> range | list[int]:
        """Return the cells that a rank must have, complete, after the collective."""
        return wanted_after(self.kind, self.world, rank, self.root, self.cells)

    def of_rank(self, rank: int) -> Iterator[tuple[list[Transfer], list[Transfer]]]:
        """Yield what one rank sends and what it receives in every round. Rounds in which it does
        neither are left out.
        """
        for round_ in self.rounds:
            sends = np.flatnonzero(round_.src == rank).tolist()
            receives = np.flatnonzero(round_.dst == rank).tolist()
            if not sends and not receives:
                continue
            for turn in range(round_.repeat):
                yield (
                    [self._transfer(round_, index, turn) for index in sends],
                    [self._transfer(round_, index, turn) for index in receives],
                )

    def _transfer(self, round_: Round, index: int, turn: int) -> Transfer:
        first = int(round_.cell[index]) + turn * round_.shift
        count = int(round_.count[index])
        cells = tuple(cell % self.cells for cell in range(first, first + count))
        return Transfer(int(round_.src[index]), int(round_.dst[index]), cells, round_.reduce)

    def reversed(self, kind: Kind, name: str | None = None, *, in_order: bool = False) -> Schedule:
        """Return the same transfers backwards, from the last round to the first: what spread a cell
        now collects it. The result has this `kind`, and `name` if it is given.

        An all-gather becomes a reduce-scatter, a broadcast a reduce, a scatter a gather. `in_order`
        keeps the order of the rounds, so that ranks are added in their order; no round may depend
        on another.
        """
        rounds = [
            replace(
                round_,
                src=round_.dst,
                dst=round_.src,
                cell=(round_.cell + (round_.repeat - 1) * round_.shift) % self.cells,
                shift=-round_.shift,
                reduce=kind in REDUCING,
            )
            for round_ in self.rounds
        ]
        if not in_order:
            rounds.reverse()
        return replace(self, kind=kind, name=name or self.name, rounds=tuple(rounds))


def together(
    src: ArrayLike,
    dst: ArrayLike,
    cell: ArrayLike = 0,
    *,
    reduce: bool,
    count: ArrayLike = 1,
    repeat: int = 1,
    shift: int = 0,
) -> Round:
    """Make a Round. A single number applies to all of its transfers."""
    arrays = np.broadcast_arrays(np.atleast_1d(np.asarray(src, dtype=np.int64)), dst, cell, count)
    sources, targets, cells, counts = (
        np.ascontiguousarray(array, dtype=np.int64) for array in arrays
    )
    return Round(sources, targets, cells, counts, reduce, repeat, shift)


def followed_by(first: Schedule, second: Schedule, name: str) -> Schedule:
    """Return an all-reduce that runs `first`, then `second`."""
    assert (first.world, first.cells) == (second.world, second.cells)
    return replace(first, name=name, kind="all_reduce", rounds=(*first.rounds, *second.rounds))


def spans(numel: int, cells: int) -> list[tuple[int, int]]:
    """Return the elements [start, stop) of each cell of a flat tensor. They are cut as
    `torch.tensor_split` cuts: the first `numel % cells` cells are one element longer.
    """
    size, longer = divmod(numel, cells)
    starts = [cell * size + min(cell, longer) for cell in range(cells + 1)]
    return list(pairwise(starts))


def held_before(kind: Kind, world: int, rank: int, root: int, cells: int) -> range | list[int]:
    """Return the cells in which a rank has content before the collective. Cells of an all-to-all
    are numbered src * world + dst.
    """
    if kind in REDUCING:
        return range(cells)
    if kind in ("broadcast", "scatter"):
        if rank == root:
            return range(cells)
        return range(0)
    if kind == "all_to_all":
        return range(rank * world, (rank + 1) * world)
    return cells_of(rank, world, cells)


def wanted_after(kind: Kind, world: int, rank: int, root: int, cells: int) -> range | list[int]:
    """Return the cells that a rank must have, complete, after the collective."""
    if kind in ("all_reduce", "broadcast", "all_gather"):
        return range(cells)
    if kind in ("reduce", "gather"):
        if rank == root:
            return range(cells)
        return range(0)
    if kind == "all_to_all":
        return [src * world + rank for src in range(world)]
    return cells_of(rank, world, cells)


def cells_of(rank: int, world: int, cells: int) -> range:
    """Return a rank's own cells, if every rank has its share."""
    assert cells == world, "one cell a rank"
    return range(rank, rank + 1)
