"""The cost of a collective on a network: a latency and seconds per byte, computed from its schedule
once.

A schedule's time on a Network is a linear function of the bytes, so two values of it determine the
cost. If many rounds cost the same, a schedule made here has one round that counts as many. The
schedules that `collectives` runs contain every transfer: 65,536 squared for an all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lockstep.schedules.algorithms import schedule
from lockstep.schedules.network import Link, Network
from lockstep.schedules.schedule import Kind, Round, Schedule, together


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one collective: `latency + bytes * per_byte` seconds, in `rounds` messages one
    after the other.
    """

    latency: float
    per_byte: float
    rounds: int
    sends: float
    """Bytes sent by the rank that sends most, divided by the bytes of the tensor."""

    def seconds(self, bytes: float) -> float:
        return self.latency + bytes * self.per_byte if bytes else 0.0


NOTHING = Cost(0.0, 0.0, 0, 0.0)


@lru_cache(maxsize=4096)
def cost(network: Network, kind: Kind, algorithm: str, world: int) -> Cost:
    """Return the cost of a collective among `world` ranks by an algorithm of `collectives`."""
    if world == 1:
        return NOTHING
    planned = _schedule(kind, algorithm, world, network.ranks_per_node)
    latency = network.time(planned, 0)
    per_byte = network.time(planned, 1.0) - latency
    if latency >= 1e3:
        per_byte = _per_byte(network, planned)
    return Cost(latency, per_byte, len(planned), _most_sent(planned))


def _per_byte(network: Network, planned: Schedule) -> float:
    """Return the seconds per byte, computed without latency: next to a very long latency, rounding
    would lose the time of one byte.
    """
    without = replace(
        network,
        within=Link(0.0, network.within.bandwidth),
        between=Link(0.0, network.between.bandwidth),
    )
    return without.time(planned, 1.0)


def _schedule(kind: Kind, algorithm: str, world: int, per_node: int) -> Schedule:
    rounds: list[Round] = []
    if algorithm == "direct" and kind == "all_to_all":
        for distance, repeat in _distances(world, per_node):
            rounds.append(_distance(world, distance, repeat))
        return Schedule("direct", kind, world, world * world, tuple(rounds))
    if algorithm == "central" and kind == "all_reduce":
        others = _others(world, per_node)
        rounds += [together(rank, 0, reduce=True, repeat=repeat) for rank, repeat in others]
        rounds += [together(0, rank, reduce=False, repeat=repeat) for rank, repeat in others]
        return Schedule("central", kind, world, 1, tuple(rounds))
    nodes = per_node if algorithm == "hierarchical" else None
    return schedule(kind, algorithm, world, ranks_per_node=nodes)


def _distances(world: int, per_node: int) -> list[tuple[int, int]]:
    """Return pairs (distance from sender to receiver, number of rounds with the same cost). All
    distances of at least a node's size, in either direction, cost the same.
    """
    forward = range(1, min(per_node, world))
    backward = range(max(1, world - per_node + 1), world)
    near = sorted({*forward, *backward})
    distances = [(distance, 1) for distance in near]
    far = world - 1 - len(near)
    if far:
        distances.append((per_node, far))
    return distances


def _distance(world: int, distance: int, repeat: int) -> Round:
    ranks = np.arange(world)
    return together(ranks, (ranks + distance) % world, ranks, reduce=False, repeat=repeat)


def _others(world: int, per_node: int) -> list[tuple[int, int]]:
    """Return pairs (a rank, number of ranks for which a message to rank 0 costs the same)."""
    near = min(per_node, world) - 1
    far = world - 1 - near
    pairs = [(1, near), (world - 1, far)]
    return [(rank, count) for rank, count in pairs if count > 0]


def _most_sent(planned: Schedule) -> float:
    sends = np.zeros(planned.world)
    for one_round in planned.rounds:
        np.add.at(sends, one_round.src, one_round.repeat * one_round.count)
    cells = planned.world if planned.kind == "all_to_all" else planned.cells
    return float(sends.max()) / cells
