"""Ranks of several nodes that do not progress: each node tells what it sees of its own, the driver
explains all of them together.

one node    its ranks have been quiet for too long: it tells what it sees of them, and the other
            nodes are asked
the others  tell the same of theirs, once they have been quiet for as long; ranks that progress are
            slow, and not waited for
verdict     from what all nodes have told, by the rules of one host (stalls.explain), the same for
            all of them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lockstep.launcher.stalls import Sight, Stall, explain


@dataclass(frozen=True, slots=True)
class Quiet:
    """What a node tells of its ranks when none of them has progressed for `seconds`. Times are
    on its own clock.
    """

    seconds: float
    sights: Mapping[int, Sight]
    now_ns: int


class Told:
    """What the nodes have told of the ranks that were started together, by their ids."""

    def __init__(self) -> None:
        self._told: dict[str, Quiet] = {}
        self._explained = False

    def quiet(self, node: str, told: Quiet) -> bool:
        """Whether it is the first, so that the other nodes are to be asked."""
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
        """Once all nodes (`labels`, by id) have told, once."""
        if self._explained or not labels or set(labels) - set(self._told):
            return None
        self._explained = True
        sights = {rank: sight for node in labels for rank, sight in self._told[node].sights.items()}
        found = explain(sights, max(self._told[node].seconds for node in labels))
        if found is None:
            return None
        if not found.elsewhere:
            where = next(
                label for node, label in labels.items() if found.rank in self._told[node].sights
            )
            return replace(found, message=f"{found.message} Rank {found.rank} is on {where}.")
        message = found.message.replace(
            "all ranks of this host wait", "all ranks of all nodes wait"
        )
        message = message.replace(
            ": for other hosts, or the network", ", which does not end: look at the network"
        )
        return replace(found, message=message, elsewhere=False)


class Asked:
    """A node's end: what it tells the driver (`send`), and what it has heard. stalls.Watcher
    tells it, and asks it.
    """

    def __init__(self, send: Callable[[str, object], None]) -> None:
        self._send = send
        self._asked = False
        self._verdict: Stall | None = None

    def note(self, verdict: Stall | None) -> None:
        """The driver asks, or has explained. Called in the thread that reads from it."""
        self._asked = self._asked or verdict is None
        self._verdict = verdict or self._verdict

    def asked(self) -> bool:
        return self._asked

    def tell(self, sights: Mapping[int, Sight], quiet: float) -> None:
        self._send("quiet", Quiet(quiet, sights, time.monotonic_ns()))

    def moving(self) -> None:
        self._asked = False
        self._send("moving", None)

    def verdict(self) -> Stall | None:
        found, self._verdict = self._verdict, None
        return found
