"""Whose network is slow, where ranks talk over TCP: a ring is as slow as its slowest link, so
times alone do not say whose.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.tools.report.judged import ranks
from lockstep.training.timeline.lanes import Generation
from lockstep.training.timeline.lines import LinkUse

_SLOW = 0.5
"""Of the next quicker one's rate."""
_LEAST = 2**20
"""Bytes from which on a rate says something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """One host whose connections are slow."""

    ranks: tuple[int, ...]
    """On that host; empty where only an address is known."""
    host: str
    """Its name, or its address."""
    towards: str | None
    """Where only the connection of two hosts is slow, the other: it may be that host's network
    as well.
    """
    rate: float
    """Bytes a second while something was on its way; the median of the slow connections."""
    others: float
    """The median of the others."""

    def named(self) -> str:
        """`rank 3's network towards node-1 (12 MB/s against 110 MB/s)`."""
        whose = (
            f"{ranks(self.ranks)}'{'s' * (len(self.ranks) == 1)} network"
            if self.ranks
            else f"the network of {self.host}"
        )
        towards = f" towards {self.towards}" if self.towards else ""
        return f"{whose}{towards} ({self.rate / 1e6:.3g} MB/s against {self.others / 1e6:.3g} MB/s)"


Ends = tuple[str, str]
"""The host that sends, and the one that it is sent to: its name where it is known, else its
address.
"""


def slow_link(generation: Generation) -> SlowLink | None:
    """The host that all slow connections have in common; None where connections are alike, not
    known, or slow on several hosts.
    """
    links: dict[str, list[LinkUse]] = {}
    for lane in generation.lanes.values():
        links.setdefault(lane.begin.host, []).extend(
            link for each in lane.links for link in each.to
        )
    slow, fast = _apart(_rates(links, _names(links, some_are_missing=bool(generation.missing))))
    if not slow:
        return None
    common = _common(slow)
    host, towards = min(slow) if len(common) == 2 else (common.pop(), None)
    return SlowLink(
        ranks=tuple(rank for rank, lane in generation.lanes.items() if lane.begin.host == host),
        host=host,
        towards=towards,
        rate=statistics.median_low(slow.values()),
        others=statistics.median_low(fast.values()),
    )


def _names(hosts: Mapping[str, Sequence[LinkUse]], *, some_are_missing: bool) -> dict[str, str]:
    """Host by address. Of a host that left no file the address is its name: where all others are
    connected with it.
    """
    found = {link.here: host for host, links in hosts.items() for link in links}
    if some_are_missing and hosts:
        everybodys = set.intersection(*({link.peer for link in links} for links in hosts.values()))
        found |= {address: address for address in everybodys - found.keys()}
    return found


def _rates(hosts: Mapping[str, Sequence[LinkUse]], names: Mapping[str, str]) -> dict[Ends, float]:
    """Of connections between the training's hosts, not those with a store of checkpoints, say;
    and of those that sent enough.
    """
    totals: dict[Ends, tuple[int, float]] = {}
    for host, links in hosts.items():
        for link in links:
            if link.peer in names:
                sent, busy = totals.get((host, names[link.peer]), (0, 0.0))
                totals[host, names[link.peer]] = sent + link.sent, busy + link.busy
    return {
        ends: sent / busy for ends, (sent, busy) in totals.items() if sent >= _LEAST and busy > 0
    }


def _apart(rates: Mapping[Ends, float]) -> tuple[dict[Ends, float], dict[Ends, float]]:
    """Slow and fast connections. They are cut where neighbours are far apart, and the slow ones
    have a host in common: best one, else two.

    Fast ones may be far apart too: what is under way for a moment only is mostly waiting for its
    confirmation.
    """
    ordered = sorted(rates, key=lambda ends: rates[ends])
    cuts = [
        place
        for place, (low, high) in enumerate(pairwise(ordered), 1)
        if rates[low] <= _SLOW * rates[high]
    ]
    hosts = {cut: len(_common(ordered[:cut])) for cut in cuts}
    cut = next((cut for count in (1, 2) for cut in cuts if hosts[cut] == count), 0)
    return {ends: rates[ends] for ends in ordered[:cut]}, {
        ends: rates[ends] for ends in ordered[cut:]
    }


def _common(connections: Iterable[Ends]) -> set[str]:
    """The hosts that are an end of each."""
    return set.intersection(*(set(ends) for ends in connections))
