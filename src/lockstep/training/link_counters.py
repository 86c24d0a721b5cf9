"""What this rank's connections to other hosts did from one look to the next."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.collectives.tcp import Connection, connections

_EVERY = 1.0  # s, at first
_RARER = 1.02  # from look to look: what is written grows with the logarithm of time
_DIGITS = 7


class LinkCounters:
    """Looks now and then."""

    def __init__(self) -> None:
        self._due, self._every = 0.0, _EVERY
        self._before: dict[tuple[str, str], Connection] = {}

    def look(self, *, now_or_never: bool = False) -> list[dict[str, Any]]:
        """A row for each host that this rank is connected with; none where it is not yet time
        for a look.
        """
        now = time.monotonic()
        if now < self._due and not now_or_never:
            return []
        self._due, self._every = now + self._every, self._every * _RARER
        found = {each.ends: each for each in connections()}
        rows = by_host(self._before, found.values())
        self._before = found
        return rows


def by_host(
    before: Mapping[tuple[str, str], Connection], found: Iterable[Connection]
) -> list[dict[str, Any]]:
    """Seconds, bytes and packets since `before`, summed over the connections with a host; the
    longest round trip, the highest rate.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for each in found:
        old = before.get(each.ends)
        if old is not None and old.sent > each.sent:
            old = None  # another connection, between the same ends
        nothing = {"rtt": 0.0, "busy": 0.0, "sent": 0, "retransmitted": 0, "rate": 0.0}
        row = rows.setdefault(
            (each.here, each.host), {"here": each.here, "peer": each.host, **nothing}
        )
        row["rtt"] = round(max(row["rtt"], each.round_trip), _DIGITS)
        row["busy"] = round(row["busy"] + each.busy - (old.busy if old else 0.0), _DIGITS)
        row["sent"] += each.sent - (old.sent if old else 0)
        row["retransmitted"] += each.retransmitted - (old.retransmitted if old else 0)
        row["rate"] = max(row["rate"], each.rate)
    return list(rows.values())
