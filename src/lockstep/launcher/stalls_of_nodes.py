"""Stalls on several nodes: what each node reports of its own ranks, and how the driver explains them
together (stall_report.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lockstep.launcher.stall_report import RankSnapshot, Snapshots, Stall, explain


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node reports about its ranks when none of them has progressed for `seconds`. Times are
    on the node's own clock.
    """

    seconds: float
    snapshots: Snapshots
    now_ns: int


class NodeReports:
    """What the nodes have reported about ranks that were started together, by the nodes' ids."""

    def __init__(self) -> None:
        self._reports: dict[str, NodeReport] = {}
        self._explained = False

    def add(self, node: str, report: NodeReport) -> bool:
        """Store a node's report. Return whether it is the first, so that the other nodes must be
        asked.
        """
        first = not self._reports
        shift_ns = time.monotonic_ns() - report.now_ns
        snapshots = {}
        for rank, snapshot in report.snapshots.items():
            view = replace(snapshot.view, since_ns=snapshot.view.since_ns + shift_ns)
            snapshots[rank] = replace(snapshot, view=view)
        self._reports[node] = replace(report, snapshots=snapshots)
        return first

    def remove(self, node: str) -> None:
        """Forget a node's report: its ranks progress again."""
        self._reports.pop(node, None)
        self._explained = False

    def explain(self, labels: Mapping[str, str]) -> Stall | None:
        """Return the stall, once, after all nodes (`labels`, by id) have reported."""
        if self._explained or not labels or labels.keys() - self._reports:
            return None
        self._explained = True
        quiet = 0.0
        snapshots: dict[int, RankSnapshot] = {}
        nodes: dict[int, str] = {}
        for node, label in labels.items():
            report = self._reports[node]
            quiet = max(quiet, report.seconds)
            snapshots.update(report.snapshots)
            nodes.update(dict.fromkeys(report.snapshots, label))
        return explain(snapshots, quiet, nodes)


class OtherNodes:
    """A node's end of the exchange: what it reports to the driver (`send`), and what the driver has
    answered. `Watcher` reports to it and asks it.
    """

    def __init__(self, send: Callable[[str, object], None]) -> None:
        self._send = send
        self.waiting = False
        """Whether another node waits for this one's ranks."""
        self._stall: Stall | None = None

    def note(self, stall: Stall | None) -> None:
        """Note the driver's question (None) or its explanation. Called in the thread that reads
        from the driver.
        """
        if stall is None:
            self.waiting = True
        else:
            self._stall = stall

    def report_quiet(self, snapshots: Snapshots, quiet: float) -> None:
        self._send("quiet", NodeReport(quiet, snapshots, time.monotonic_ns()))

    def report_progress(self) -> None:
        self.waiting = False
        self._send("moving", None)

    def pop_stall(self) -> Stall | None:
        """Return the driver's explanation, once."""
        stall = self._stall
        self._stall = None
        return stall
