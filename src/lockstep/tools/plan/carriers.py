"""What a collective costs on a network: a latency and seconds per byte, read off its schedule once.

A schedule's time on a Network is a straight line in the bytes, so two values of it are all that a
simulation needs. Where many rounds cost the same one stands for all of them here: the schedules
that `collectives` runs write out W rounds of W transfers, 65,536 squared for what goes from every
rank to every other, and a plan only asks for their time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lockstep.collectives.algorithms import schedule
from lockstep.collectives.network import Link, Network
from lockstep.collectives.schedule import Kind, Round, Schedule, together


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one collective: `latency + bytes * per_byte` seconds, in `rounds` messages that wait
    for each other.
    """

    latency: float
    per_byte: float
    rounds: int
    sends: float
    """Bytes that the rank which sends most sends, over the bytes of the tensor."""

    def seconds(self, bytes: float) -> float:
        return self.latency + bytes * self.per_byte if bytes else 0.0


NOTHING = Cost(0.0, 0.0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class OneHost:
    """Ranks of one host, as they were measured, by their number."""

    sums: Mapping[int, Cost]
    """Of one bucket of gradients, however it is summed here."""
    small: Mapping[int, float]
    """Seconds of a message of a few numbers."""
    beside: bool = False
    """Sums go on while ranks compute: on GPUs. On CPUs they would take the cores from the
    computation, and nothing is gained.
    """


@lru_cache(maxsize=4096)
def cost(network: Network, kind: Kind, algorithm: str, world: int) -> Cost:
    """Of a collective among so many ranks, by one of the algorithms of `collectives`."""
    if world == 1:
        return NOTHING
    found = _schedule(kind, algorithm, world, network.ranks_per_node)
    latency = network.time(found, 0)
    per_byte = network.time(found, 1.0) - latency if latency < 1e3 else _per_byte(network, found)
    return Cost(latency, per_byte, len(found), _most_sent(found))


def _per_byte(network: Network, found: Schedule) -> float:
    """Where the latency is so long that one byte more would be lost in its rounding."""
    without = replace(
        network,
        within=Link(0.0, network.within.bandwidth),
        between=Link(0.0, network.between.bandwidth),
    )
    return without.time(found, 1.0)


def quickest(
    network: Network, kind: Kind, algorithms: tuple[str, ...], world: int, bytes: float
) -> Cost:
    """Of several algorithms, the one that is over first with so many bytes."""
    return min(
        (cost(network, kind, each, world) for each in algorithms),
        key=lambda each: each.seconds(bytes),
    )


def part(network: Network, size: int, stride: int) -> Network:
    """The network of one group among several alike, each of `size` ranks that are `stride`
    apart: the groups of a node share its way out.
    """
    assert size >= 1
    assert stride >= 1
    here = max(1, network.ranks_per_node // stride)  # of a group, on one node
    groups = min(stride, network.ranks_per_node)
    between = Link(network.between.latency, network.between.bandwidth / groups)
    return replace(network, between=between, ranks_per_node=here)


def _schedule(kind: Kind, algorithm: str, world: int, per_node: int) -> Schedule:
    if algorithm == "direct" and kind in ("all_gather", "all_to_all"):
        rounds = tuple(
            _distance(world, distance, repeat) for distance, repeat in _distances(world, per_node)
        )
        return Schedule(
            "direct", kind, world, world * world if kind == "all_to_all" else world, rounds
        )
    if algorithm == "central" and kind == "all_reduce":
        spread = tuple(
            together(0, rank, reduce=False, repeat=repeat)
            for rank, repeat in _others(world, per_node)
        )
        collect = tuple(
            together(rank, 0, reduce=True, repeat=repeat)
            for rank, repeat in _others(world, per_node)
        )
        return Schedule("central", kind, world, 1, (*collect, *spread))
    return schedule(
        kind, algorithm, world, ranks_per_node=per_node if algorithm == "hierarchical" else None
    )


def _distances(world: int, per_node: int) -> list[tuple[int, int]]:
    """Pairs (distance to whom every rank sends, rounds that cost as much): those of at least a
    node's size, either way, are alike.
    """
    near = sorted({*range(1, min(per_node, world)), *range(max(1, world - per_node + 1), world)})
    far = world - 1 - len(near)
    return [(distance, 1) for distance in near] + ([(per_node, far)] if far else [])


def _distance(world: int, distance: int, repeat: int) -> Round:
    ranks = np.arange(world)
    return together(ranks, (ranks + distance) % world, ranks, reduce=False, repeat=repeat)


def _others(world: int, per_node: int) -> list[tuple[int, int]]:
    """Pairs (a rank, how many are as far from rank 0 as it is)."""
    near = min(per_node, world) - 1
    far = world - 1 - near
    return [(1, near)] * (near > 0) + [(world - 1, far)] * (far > 0)


def _most_sent(found: Schedule) -> float:
    sends = np.zeros(found.world)
    for each in found.rounds:
        np.add.at(sends, each.src, each.repeat * each.count)
    cells = found.world if found.kind == "all_to_all" else found.cells
    return float(sends.max()) / cells
