"""Stalls on several nodes: what each node reports of its own ranks, and how the driver explains them
together (stalls.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lockstep.launcher.stalls import Sight, Stall, explain


@dataclass(frozen=True, slots=True)
class Quiet:
    """What a node reports about its ranks when none of them has progressed for `seconds`. Times are
    on the node's own clock.
    """

    seconds: float
    sights: Mapping[int, Sight]
    now_ns: int


class QuietNodes:
    """What the nodes have reported about ranks that were started together, by the nodes' ids."""

    def __init__(self) -> None:
        self._told: dict[str, Quiet] = {}
        self._explained = False

    def quiet(self, node: str, told: Quiet) -> bool:
        """Store a node's report. Return whether it is the first, so that the other nodes must be
        asked.
        """
        first = not self._told
        shift = time.monotonic_ns() - told.now_ns
        self._told[node] = replace(
            told,
            sights={
                rank: replace(sight, view=replace(sight.view, since_ns=sight.view.since_ns + shift))
                for rank, sight in told.sights.items()
            },
        )
        return first

    def moving(self, node: str) -> None:
        self._told.pop(node, None)
        self._explained = False

    def verdict(self, labels: Mapping[str, str]) -> Stall | None:
        """Return the stall, once, after all nodes (`labels`, by id) have reported."""
        if self._explained or not labels or set(labels) - set(self._told):
            return None
        self._explained = True
        told = {node: self._told[node] for node in labels}
        sights = {rank: sight for quiet in told.values() for rank, sight in quiet.sights.items()}
        nodes = {rank: labels[node] for node, quiet in told.items() for rank in quiet.sights}
        return explain(sights, max(quiet.seconds for quiet in told.values()), nodes)


class OtherNodes:
    """A node's end of the exchange: what it reports to the driver (`send`), and what the driver has
    answered. `Watcher` reports to it and asks it.
    """

    def __init__(self, send: Callable[[str, object], None]) -> None:
        self._send = send
        self.asked = False
        """Whether another node waits for its ranks."""
        self._verdict: Stall | None = None

    def note(self, verdict: Stall | None) -> None:
        """Note the driver's question (None) or its explanation. Called in the thread that reads
        from the driver.
        """
        self.asked = self.asked or verdict is None
        self._verdict = verdict or self._verdict

    def tell(self, sights: Mapping[int, Sight], quiet: float) -> None:
        self._send("quiet", Quiet(quiet, sights, time.monotonic_ns()))

    def moving(self) -> None:
        self.asked = False
        self._send("moving", None)

    def verdict(self) -> Stall | None:
        found, self._verdict = self._verdict, None
        return found
