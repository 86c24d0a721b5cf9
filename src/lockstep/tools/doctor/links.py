"""Measure latency and bandwidth between any two ranks, in both directions; find slow links."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.collectives import Group
from lockstep.tools.finding import Finding, judged
from lockstep.tools.timing.output_files import table

_PINGS = 20
_WORTH = 0.15  # seconds of the measurement of a direction, approximately
_PROBE, _LARGEST = 2**18, 2**26  # bytes
_AGAIN = 2  # repetitions for a direction that looks slow
SLOWEST = 60e6
"""A link between hosts is slow below this many bytes/s, whatever the other links have: half of what
Gigabit Ethernet carries.
"""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link from one rank or node to another, as measured."""

    source: str
    target: str
    latency: float
    """Seconds: half the round trip of a small message."""
    bandwidth: float
    """Bytes a second."""


def measure(
    group: Group, names: Sequence[str], device: torch.device, *, hosts: bool
) -> list[MeasuredLink]:
    """Measure every pair of the group's ranks, one after another, while the other ranks wait. All
    members must call it, and all get the result.

    A direction that looks slow (with `hosts`, by the rule between hosts) is measured again, and the
    best result counts: a busy machine is slow once, a slow link every time.
    """
    pairs = list(itertools.permutations(range(group.size), 2))
    best = _measured(group, pairs, names, device)
    for _ in range(_AGAIN):
        suspects = slow(list(best.values()), hosts=hosts)
        slow_pairs = [pair for pair, link in best.items() if link in suspects]
        for pair, link in _measured(group, slow_pairs, names, device).items():
            if link.bandwidth > best[pair].bandwidth:
                best[pair] = link
    return list(best.values())


def _measured(
    group: Group, pairs: Sequence[tuple[int, int]], names: Sequence[str], device: torch.device
) -> dict[tuple[int, int], MeasuredLink]:
    """Measure these pairs of ranks. All members must pass the same pairs."""
    if not pairs:
        return {}
    table = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
    for row, (source, target) in zip(table, pairs, strict=True):
        group.all_reduce(torch.zeros(1, device=device)).wait()
        if group.rank in (source, target):
            measured = _measure_pair(group, source, target, device)
            if group.rank == source:
                row[0], row[1] = measured
    group.all_reduce(table).wait()
    links = {}
    for (source, target), (latency, bandwidth) in zip(pairs, table.tolist(), strict=True):
        link = MeasuredLink(names[source], names[target], latency, bandwidth)
        links[source, target] = link
    return links


def _measure_pair(
    group: Group, source: int, target: int, device: torch.device
) -> tuple[float, float]:
    """Return the latency and the bandwidth from one rank to another. Both call it; the source's
    result counts.
    """
    small = torch.zeros(1, device=device)
    trips = [_trip(group, source, target, small) for _ in range(_PINGS)]
    data = torch.zeros(_LARGEST, dtype=torch.uint8, device=device)
    probe_seconds = _trip(group, source, target, data[:_PROBE])
    worthwhile = _PROBE / probe_seconds * _WORTH
    count = torch.tensor([min(_LARGEST, max(_PROBE, worthwhile))], device=device).long()
    _trip(group, source, target, count)  # the target receives the source's number
    seconds = _trip(group, source, target, data[: int(count)])
    return statistics.median(trips) / 2, int(count) / seconds


def _trip(group: Group, source: int, target: int, data: Tensor) -> float:
    """Send `data` to the target, which answers when all has arrived. Return the seconds."""
    answer = torch.zeros(1, device=data.device)
    begin = time.perf_counter()
    if group.rank == source:
        group.send(data, target)
        group.receive(answer, target)
    else:
        group.receive(data, source)
        group.send(answer, source)
    answer.item()
    return time.perf_counter() - begin


def slow(links: Sequence[MeasuredLink], *, hosts: bool) -> list[MeasuredLink]:
    """Return the links with less than half of the median bandwidth, and between hosts also those
    below SLOWEST.
    """
    least = _usual(links) / 2
    if hosts:
        least = max(least, SLOWEST)
    return [link for link in links if link.bandwidth < least]


def _usual(links: Sequence[MeasuredLink]) -> float:
    return statistics.median([link.bandwidth for link in links] or [0.0])


def judge(links: Sequence[MeasuredLink], *, hosts: bool) -> Finding:
    """Judge the links, and name each slow link."""
    if not links:
        return judged("links", "none: one rank has no link")
    usual = _usual(links)
    slowest = slow(links, hosts=hosts)
    value = f"{len(links)} measured, {_rate(usual)} usually"
    if not slowest:
        return judged("links", value)
    slow_links = "; ".join(
        f"{link.source} to {link.target}: {_rate(link.bandwidth)}, {1e3 * link.latency:.2f} ms"
        for link in slowest
    )
    expected = max(usual, SLOWEST) if hosts else usual
    kind = "slow link" if len(slowest) == 1 else "slow links"
    problem = f"{kind}, {slow_links}, where {_rate(expected)} or more is expected"
    if hosts:
        advice = "check its cable, port, driver and other traffic"
        fix = f"{problem}; every step waits for the slowest link: {advice}"
        return judged("links", value, fix=fix)
    return judged("links", value, warn=f"{problem}; the machine may be busy: try again")


def squares(links: Sequence[MeasuredLink]) -> str:
    """Return two tables, one below the other: MB/s and microseconds, from row to column."""
    speeds = {}
    times = {}
    for link in links:
        pair = link.source, link.target
        speeds[pair] = f"{link.bandwidth / 1e6:,.0f}"
        times[pair] = f"{1e6 * link.latency:,.0f}"
    return f"{_square('MB/s from', speeds)}\n\n{_square('us from', times)}" if links else ""


def _square(title: str, cells: Mapping[tuple[str, str], str]) -> str:
    names = list(dict.fromkeys(source for source, _ in cells))
    rows = []
    for source in names:
        row = [cells.get((source, target), "-") for target in names]
        rows.append([source, *row])
    return table([title, *names], rows)


def _rate(bandwidth: float) -> str:
    if bandwidth >= 1e9:
        return f"{bandwidth / 1e9:.2f} GB/s"
    return f"{bandwidth / 1e6:.1f} MB/s"
