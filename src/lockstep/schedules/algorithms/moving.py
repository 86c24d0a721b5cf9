"""Collectives that only move data: broadcast, scatter, all-gather, all-to-all. Backwards they
collect data: see `Schedule.reversed`.

The costs are for W ranks and a tensor of S bytes, with latency a and b seconds per byte (Thakur,
Rabenseifner and Gropp, 2005).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.schedules.schedule import Kind, Ranks, Schedule, together


def flat(kind: Kind, world: int, root: int = 0) -> Schedule:
    """The root sends to one rank after the other: (W-1)(a + S b) for a broadcast, (W-1)(a + S/W
    b) for a scatter.
    """
    others = [rank for rank in range(world) if rank != root]
    cells = 1 if kind == "broadcast" else world
    rounds = tuple(
        together(root, rank, 0 if kind == "broadcast" else rank, reduce=False) for rank in others
    )
    return Schedule("central", kind, world, cells, rounds, root)


def binomial_broadcast(world: int, root: int = 0) -> Schedule:
    """Every rank that has the tensor sends it on: ceil(log2 W) (a + S b). The farthest ranks come
    first. So the reversed schedule adds neighbours first, along a balanced tree.

    Ranks count from the root: every multiple of 2d sends to the rank d above, for d from the
    largest power of two below W down to 1.
    """
    rounds = [
        together((start + root) % world, (start + d + root) % world, reduce=False)
        for d, start in _levels(world)
    ]
    return Schedule("tree", "broadcast", world, 1, tuple(rounds), root)


def binomial_scatter(world: int, root: int = 0) -> Schedule:
    """The pieces go down the tree of `binomial_broadcast`. Each rank gets its own piece and those
    of the ranks below it: ceil(log2 W) a + (W-1)/W S b.
    """
    rounds = []
    for d, start in _levels(world):
        to = start + d
        piece = (to + root) % world
        rounds.append(
            together(
                (start + root) % world, piece, piece, reduce=False, count=np.minimum(d, world - to)
            )
        )
    return Schedule("tree", "scatter", world, world, tuple(rounds), root)


def _levels(world: int) -> Iterator[tuple[int, Ranks]]:
    """Yield the distance of each level of the tree, and the ranks that send in it."""
    distance = 1 << max(0, (world - 1).bit_length() - 1)
    while distance and world > 1:
        yield distance, np.arange(0, world - distance, 2 * distance)
        distance //= 2


def ring_all_gather(world: int) -> Schedule:
    """Every rank sends to its right the piece that it received last: (W-1)(a + S/W b)."""
    ranks = np.arange(world)
    rounds = (
        (together(ranks, (ranks + 1) % world, ranks, reduce=False, repeat=world - 1, shift=-1),)
        if world > 1
        else ()
    )
    return Schedule("ring", "all_gather", world, world, rounds)


def doubling_all_gather(world: int) -> Schedule:
    """The number of pieces that a rank holds doubles each round: ceil(log2 W) a + (W-1)/W S b
    (Bruck and others, 1997), for any W.
    """
    ranks = np.arange(world)
    rounds = []
    held = 1
    while held < world:
        # A rank holds the pieces from its own number on; it sends them to the rank `held` below.
        rounds.append(
            together(
                ranks, (ranks - held) % world, ranks, reduce=False, count=min(held, world - held)
            )
        )
        held *= 2
    return Schedule("doubling", "all_gather", world, world, tuple(rounds))


def direct_all_gather(world: int) -> Schedule:
    """Every rank sends its piece to each other: (W-1)(a + S/W b). No rank passes a piece on."""
    ranks = np.arange(world)
    rounds = tuple(
        together(ranks, (ranks + distance) % world, ranks, reduce=False)
        for distance in range(1, world)
    )
    return Schedule("direct", "all_gather", world, world, rounds)


def direct_all_to_all(world: int) -> Schedule:
    """In round d every rank sends to the rank d above it: (W-1)(a + S/W b). Cells are numbered src
    * W + dst.
    """
    ranks = np.arange(world)
    rounds = tuple(
        together(
            ranks,
            (ranks + distance) % world,
            ranks * world + (ranks + distance) % world,
            reduce=False,
        )
        for distance in range(1, world)
    )
    return Schedule("direct", "all_to_all", world, world * world, rounds)
