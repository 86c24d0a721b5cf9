"""All-reduce algorithms: each first collects the sums, then spreads them.

The costs are for W ranks and a tensor of S bytes, with latency a and b seconds per byte (Thakur,
Rabenseifner and Gropp, 2005; Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.schedules.algorithms.moving import (
    binomial_broadcast,
    direct_all_gather,
    flat,
)
from lockstep.schedules.schedule import Ranks, Round, Schedule, followed_by, together


def central(world: int) -> Schedule:
    """Everything goes through rank 0, one rank after the other: 2(W-1)(a + S b). The naive way:
    rank 0 sends and receives everything.
    """
    spread = flat("broadcast", world)
    return followed_by(spread.reversed("reduce", in_order=True), spread, "central")


def tree(world: int) -> Schedule:
    """Up a binomial tree and down again: 2 ceil(log2 W)(a + S b)."""
    spread = binomial_broadcast(world)
    return followed_by(spread.reversed("reduce"), spread, "tree")


def ring(world: int) -> Schedule:
    """Twice around the ring: 2(W-1) a + 2(W-1)/W S b. Each rank sends 2(W-1)/W of the tensor
    whatever W is; only the latency grows.

    First, cell r starts at rank r, and every rank on its way adds to it. After W-1 rounds rank r -
    1 has the sum of cell r. Then the sums go around again.
    """
    ranks = np.arange(world)
    right = (ranks + 1) % world
    collect = together(ranks, right, ranks, reduce=True, repeat=world - 1, shift=-1)
    spread = together(ranks, right, right, reduce=False, repeat=world - 1, shift=-1)
    return Schedule("ring", "all_reduce", world, world, (collect, spread) if world > 1 else ())


def direct(world: int) -> Schedule:
    """Every rank collects one cell from all others and sends the sum to all: 2(W-1)(a + S/W b).
    Every contribution reaches every rank in two messages.
    """
    spread = direct_all_gather(world)
    return followed_by(spread.reversed("reduce_scatter", in_order=True), spread, "direct")


def recursive_doubling(world: int) -> Schedule:
    """Pairs exchange everything, at distance 1, 2, 4 ...: log2(W)(a + S b), and two more rounds if
    W is no power of two.

    For a power of two all ranks add along one balanced tree: ((0+1)+(2+3))+((4+5)+(6+7)).
    """
    folded = _Folded.of(world)
    core = folded.core
    rounds = []
    distance = 1
    while distance < len(core):
        partner = core[np.arange(len(core)) ^ distance]
        rounds.append(together(core, partner, reduce=True))
        distance *= 2
    return Schedule("recursive_doubling", "all_reduce", world, 1, folded.around(rounds, 1))


def halving_doubling(world: int) -> Schedule:
    """Pairs exchange halves, quarters ..., at distance 1, 2, 4 ..., then back: 2 log2(W) a +
    2(W-1)/W S b. Rabenseifner's algorithm.

    The nearest pairs come first. So for a power of two, every cell is added along the balanced tree
    of the ranks. In the usual order the farthest pairs come first: rank 0 with W/2. If W is no
    power of two, it costs two more rounds of the whole tensor.
    """
    folded = _Folded.of(world)
    core = folded.core
    cells = max(1, len(core))
    places = np.arange(len(core))
    start = np.zeros_like(places)  # the first cell of the range that a rank still collects
    halving = []
    distance, count = 1, cells // 2
    while distance < len(core):
        upper = (places & distance) > 0
        keep, give = start + count * upper, start + count * ~upper
        halving.append(together(core, core[places ^ distance], give, reduce=True, count=count))
        start = keep
        distance, count = distance * 2, count // 2
    collect = Schedule("", "reduce_scatter", world, cells, tuple(halving))
    doubling = collect.reversed("all_gather").rounds
    return Schedule(
        "halving_doubling", "all_reduce", world, cells, folded.around([*halving, *doubling], cells)
    )


def hierarchical(world: int, ranks_per_node: int) -> Schedule:
    """Up a tree within every node, around a ring of the nodes' first ranks, then down the trees.
    Only the ring uses the network between nodes.

    Any world size: the last node may be smaller. With n nodes of g ranks: 2 ceil(log2 g)(a + S b)
    within nodes, 2(n-1)(a + S/n b) between them.
    """
    leaders = np.arange(0, world, ranks_per_node)
    nodes = len(leaders)
    inside = [binomial_broadcast(min(ranks_per_node, world - int(first))) for first in leaders]
    spread = []
    for depth in range(max(len(node.rounds) for node in inside)):
        parts = [
            (node.rounds[depth], int(first))
            for node, first in zip(inside, leaders, strict=True)
            if depth < len(node.rounds)
        ]
        src = np.concatenate([transfers.src + first for transfers, first in parts])
        dst = np.concatenate([transfers.dst + first for transfers, first in parts])
        spread.append(together(src, dst, reduce=False, count=nodes))
    down = Schedule("", "broadcast", world, nodes, tuple(spread))
    between = tuple(
        replace(each, src=leaders[each.src], dst=leaders[each.dst]) for each in ring(nodes).rounds
    )
    return Schedule(
        "hierarchical",
        "all_reduce",
        world,
        nodes,
        (*down.reversed("reduce").rounds, *between, *down.rounds),
    )


@dataclass(frozen=True, slots=True)
class _Folded:
    """A power of two of ranks, `core`. Each other rank, `quiet`, first sends its contribution to
    the rank above it, and receives the sum from it at the end.
    """

    core: Ranks
    quiet: Ranks

    @classmethod
    def of(cls, world: int) -> _Folded:
        size = 1 << (world.bit_length() - 1)
        quiet = np.arange(0, 2 * (world - size), 2)
        return cls(np.concatenate([quiet + 1, np.arange(2 * (world - size), world)]), quiet)

    def around(self, rounds: Sequence[Round], cells: int) -> tuple[Round, ...]:
        if not len(self.quiet):
            return tuple(rounds)
        before = together(self.quiet, self.quiet + 1, reduce=True, count=cells)
        after = together(self.quiet + 1, self.quiet, reduce=False, count=cells)
        return (before, *rounds, after)
