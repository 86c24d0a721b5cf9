"""How long a schedule takes on a network, which need not exist: it is run on times instead of
tensors.

The model is Hockney's: a message of S bytes takes latency + S / bandwidth. A rank sends and
receives at the same time, one message each way. The ranks of a node share its link to other nodes.
A round lasts as long as its slowest rank or node needs. A repeated round is computed once and
multiplied: a ring of 65,536 ranks takes two computations, as a ring of 4 does. The results agree
with the closed formulas where these apply (Thakur, Rabenseifner and Gropp, 2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.knob import number, whole
from lockstep.schedules.schedule import Ranks, Round, Schedule


@dataclass(frozen=True, slots=True)
class Link:
    """A connection: `latency` in seconds, `bandwidth` in bytes per second in one direction."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        number("latency", self.latency, least=0, unit="seconds")
        if self.bandwidth != float("inf"):
            number("bandwidth", self.bandwidth, above=0, unit="bytes per second")


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes of `ranks_per_node` ranks. `within` is each rank's own link to the ranks of its node.
    `between` is a node's link to the other nodes, which its ranks share.
    """

    within: Link
    between: Link
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        whole("ranks_per_node", self.ranks_per_node)

    @classmethod
    def flat(cls, latency: float, bandwidth: float) -> Network:
        """Return a network in which every rank is a node of its own, with this `latency` in seconds
        and `bandwidth` in bytes a second.
        """
        link = Link(latency, bandwidth)
        return cls(link, link)

    def time(self, schedule: Schedule, bytes: float) -> float:
        """Return the seconds that the schedule takes for a tensor of `bytes` bytes on every rank
        (in a scatter or all-gather: all pieces together).
        """
        # The cells of an all-to-all are those of all ranks, W * W; elsewhere they are those of one
        # tensor.
        cells = schedule.world if schedule.kind == "all_to_all" else schedule.cells
        cell = bytes / cells
        return sum(
            round.repeat * self._round_seconds(round, cell, schedule.world)
            for round in schedule.rounds
        )

    def _round_seconds(self, round: Round, cell: float, world: int) -> float:
        if not len(round):
            return 0.0
        size = round.count * cell
        source = round.src // self.ranks_per_node
        target = round.dst // self.ranks_per_node
        leaves = source != target
        latency = float(np.where(leaves, self.between.latency, self.within.latency).max())
        seconds = size / np.where(leaves, self.between.bandwidth, self.within.bandwidth)
        nodes = -(-world // self.ranks_per_node)
        out = size * leaves / self.between.bandwidth
        moving = max(
            _busiest(round.src, seconds, world),
            _busiest(round.dst, seconds, world),
            _busiest(source, out, nodes),
            _busiest(target, out, nodes),
        )
        return latency + moving


def _busiest(owners: Ranks, seconds: NDArray[Any], count: int) -> float:
    """Return the largest total of `seconds` of any owner, a rank or a node."""
    return float(np.bincount(owners, weights=seconds, minlength=count).max())
