"""Times of schedules against closed formulas (Thakur, Rabenseifner and Gropp, 2005)."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

import pytest

from lockstep.schedules.algorithms import schedule
from lockstep.schedules.network import Link, Network
from lockstep.schedules.schedule import Kind
from tests.refused import refused

A, B = 3e-6, 1e-9  # seconds of latency, seconds per byte
S = 1e8  # bytes
FLAT = Network.flat(latency=A, bandwidth=1 / B)


def log(world: int) -> int:
    return ceil(log2(world))


Formula = Callable[[int], float]
ANY_WORLD: dict[tuple[Kind, str], Formula] = {
    ("all_reduce", "central"): lambda w: 2 * (w - 1) * (A + S * B),
    ("all_reduce", "tree"): lambda w: 2 * log(w) * (A + S * B),
    ("all_reduce", "ring"): lambda w: 2 * (w - 1) * A + 2 * (w - 1) / w * S * B,
    ("all_reduce", "direct"): lambda w: 2 * (w - 1) * (A + S / w * B),
    ("broadcast", "central"): lambda w: (w - 1) * (A + S * B),
    ("broadcast", "tree"): lambda w: log(w) * (A + S * B),
    ("reduce", "central"): lambda w: (w - 1) * (A + S * B),
    ("reduce", "tree"): lambda w: log(w) * (A + S * B),
    ("scatter", "central"): lambda w: (w - 1) * (A + S / w * B),
    ("scatter", "tree"): lambda w: log(w) * A + (w - 1) / w * S * B,
    ("gather", "central"): lambda w: (w - 1) * (A + S / w * B),
    ("gather", "tree"): lambda w: log(w) * A + (w - 1) / w * S * B,
    ("all_gather", "ring"): lambda w: (w - 1) * (A + S / w * B),
    ("all_gather", "doubling"): lambda w: log(w) * A + (w - 1) / w * S * B,
    ("all_gather", "direct"): lambda w: (w - 1) * (A + S / w * B),
    ("reduce_scatter", "ring"): lambda w: (w - 1) * (A + S / w * B),
    ("reduce_scatter", "halving"): lambda w: log(w) * A + (w - 1) / w * S * B,
    ("reduce_scatter", "direct"): lambda w: (w - 1) * (A + S / w * B),
    ("all_to_all", "direct"): lambda w: (w - 1) * (A + S / w * B),
}
POWERS_OF_TWO: dict[tuple[Kind, str], Formula] = {
    ("all_reduce", "recursive_doubling"): lambda w: log(w) * (A + S * B),
    ("all_reduce", "halving_doubling"): lambda w: 2 * log(w) * A + 2 * (w - 1) / w * S * B,
}


@pytest.mark.parametrize(("kind", "name"), ANY_WORLD)
def test_closed_formulas(kind: Kind, name: str) -> None:
    large = [65_536] if name in ("ring", "tree") and kind == "all_reduce" else []
    for world in (*range(1, 18), 32, 64, 100, 128, *large):
        assert FLAT.time(schedule(kind, name, world), S) == pytest.approx(
            ANY_WORLD[kind, name](world), rel=1e-12
        )


@pytest.mark.parametrize(("kind", "name"), POWERS_OF_TWO)
def test_worlds_that_are_no_power_of_two_pay_two_rounds_of_the_whole_tensor(
    kind: Kind, name: str
) -> None:
    for world in (1, 2, 4, 8, 16, 1024, 3, 5, 6, 7, 12, 1000):
        core = 2 ** int(log2(world))
        expected = POWERS_OF_TWO[kind, name](core) + (world != core) * 2 * (A + S * B)
        assert FLAT.time(schedule(kind, name, world), S) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("nodes", "ranks"), [(1, 8), (2, 8), (5, 8), (16, 4), (3, 6), (7, 1), (8192, 8)]
)
def test_hierarchical(nodes: int, ranks: int) -> None:
    network = Network(within=Link(1e-6, 1e11), between=Link(5e-6, 1e10), ranks_per_node=ranks)
    inside = 2 * log(ranks) * (1e-6 + S / 1e11)
    between = 2 * (nodes - 1) * (5e-6 + S / nodes / 1e10)
    built = schedule("all_reduce", "hierarchical", nodes * ranks, ranks_per_node=ranks)
    assert network.time(built, S) == pytest.approx(inside + between, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_way_out_of_a_node_is_shared_by_its_ranks(ranks: int) -> None:
    """In the last round of recursive doubling every rank of node 0 sends to node 1."""
    network = Network(within=Link(0.0, 1e12), between=Link(2e-6, 1e10), ranks_per_node=ranks)
    built = schedule("all_reduce", "recursive_doubling", 2 * ranks)
    assert network.time(built, S) == pytest.approx(
        log(ranks) * S / 1e12 + 2e-6 + ranks * S / 1e10, rel=1e-12
    )


def test_a_ring_crosses_the_way_out_once_a_node() -> None:
    network = Network(within=Link(1e-6, 1e11), between=Link(5e-6, 1e10), ranks_per_node=8)
    built = schedule("all_reduce", "ring", 32)
    assert network.time(built, S) == pytest.approx(2 * 31 * (5e-6 + S / 32 / 1e10), rel=1e-12)


def test_what_cannot_be_is_refused() -> None:
    for latency, bandwidth in ((-1.0, 1.0), (0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0)):
        with refused("wrong-value"):
            Link(latency, bandwidth)
    for ranks in (0, -1):
        with refused("wrong-value", name="ranks_per_node", value=ranks):
            Network(Link(A, 1 / B), Link(A, 1 / B), ranks)
