"""Networks by name: what a message costs to begin (latency) and to go on (bandwidth), between any two ranks."""

from __future__ import annotations

import math
import re

from lockstep.collectives.network import Link
from lockstep.errors import UsageError
from lockstep.plan.links.fabrics import TCP

# Latencies are those of a TCP message between two processes on such a network, to the order of magnitude. Of the rate, what is payload.
NETWORKS = {
    "100Mbit": Link(200e-6, TCP * 100e6 / 8),
    "1Gbit": Link(100e-6, TCP * 1e9 / 8),
    "10Gbit": Link(50e-6, TCP * 10e9 / 8),
    "25GbE": Link(25e-6, TCP * 25e9 / 8),
    "100GbE": Link(20e-6, TCP * 100e9 / 8),
    "free": Link(0.0, math.inf),
}
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "gbe": 1e9}
CHOICES = f"{', '.join(NETWORKS)}, or LATENCY_US,RATE such as 500,50Mbit"


def network(text: str) -> Link:
    """`100Mbit`, `25GbE`, `free`, or microseconds and a line's rate: `500,50Mbit`. Raises UsageError."""
    named = {name.lower(): link for name, link in NETWORKS.items()}
    if text.lower() in named:
        return named[text.lower()]
    latency, comma, rate = text.partition(",")
    try:
        microseconds = float(latency) if comma else math.nan
    except ValueError:
        microseconds = math.nan
    bits = bits_per_second(rate)
    if not (math.isfinite(microseconds) and microseconds >= 0 and bits):
        raise UsageError(f"--network {text} is unknown: choose one of {CHOICES}")
    return Link(microseconds / 1e6, TCP * bits / 8)


def bits_per_second(rate: str) -> float | None:
    """`100mbit`, `2.5Gbit`, `25GbE`; None for what is no rate."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit|gbe)", rate.strip().lower())
    return (float(found[1]) * _UNITS[found[2]] or None) if found else None
