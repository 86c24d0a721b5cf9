"""The cost of a collective on a network: a latency and seconds per byte, computed from its schedule
once.

A schedule's time on a Network is a linear function of the bytes, so two values of it determine the
cost. The all-to-all that `collectives` runs contains every transfer, 4,096 squared. The one made here has one
round for all that cost the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lockstep.collectives import Kind, Link, Network, Round, Schedule, schedule


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


NOTHING = Cost(0.0, 0.0, 0, 0.0)


@lru_cache(maxsize=4096)
def cost(network: Network, kind: Kind, algorithm: str, world: int) -> Cost:
    """Return the cost of a collective among `world` ranks by an algorithm of `collectives`."""
    if world == 1:
        return NOTHING
    planned = _schedule(kind, algorithm, world, network.ranks_per_node)
    # next to a very long latency, rounding would lose the time of one byte
    without_latency = replace(
        network,
        within=Link(0.0, network.within.bandwidth),
        between=Link(0.0, network.between.bandwidth),
    )
    return Cost(
        network.time(planned, 0.0),
        without_latency.time(planned, 1.0),
        len(planned),
        _most_sent(planned),
    )


def _schedule(kind: Kind, algorithm: str, world: int, per_node: int) -> Schedule:
    if algorithm == "direct" and kind == "all_to_all":
        ranks = np.arange(world)
        once = np.ones_like(ranks)
        rounds = []
        for distance, repeat in _distances(world, per_node):
            receivers = (ranks + distance) % world
            rounds.append(Round(ranks, receivers, ranks, once, reduce=False, repeat=repeat))
        return Schedule("direct", kind, world, world * world, tuple(rounds))
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


def _most_sent(planned: Schedule) -> float:
    sends = np.zeros(planned.world)
    for one_round in planned.rounds:
        np.add.at(sends, one_round.src, one_round.repeat * one_round.count)
    cells = planned.world if planned.kind == "all_to_all" else planned.cells
    return float(sends.max()) / cells
