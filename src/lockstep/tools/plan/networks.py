"""Networks between hosts: by name, or by latency and rate. Holds the share of a line rate that
collectives achieve.
"""

from __future__ import annotations

import math
import re

from lockstep.collectives import Link, Network
from lockstep.errors import UsageError

# 1448 bytes of payload in a frame of 1538 on the wire, preamble and gap included (Ethernet, MTU
# 1500, TCP with timestamps).
TCP = 0.94

# Latency of a TCP message between two processes on such a network, to the order of magnitude; rate
# of the payload.
NETWORKS = {
    "100Mbit": Link(200e-6, TCP * 100e6 / 8),
    "1Gbit": Link(100e-6, TCP * 1e9 / 8),
    "10Gbit": Link(50e-6, TCP * 10e9 / 8),
    "25GbE": Link(25e-6, TCP * 25e9 / 8),
    "100GbE": Link(20e-6, TCP * 100e9 / 8),
    "free": Link(0.0, math.inf),
}
# Between the ranks of a node: PCIe 3.0 x16. Latency of a round of a ring: NCCL's tuning tables
# (src/graph/tuning.cc, hwLat, Ring, Simple). Share of the 15.75 GB/s: a network card of 100 Gbit/s,
# which NCCL counts as 12 GB/s, gets 12 GB/s through such a slot.
_PCIE = Link(5.7e-6, 0.76 * 15.75e9)
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "gbe": 1e9}
_NUMBER = r"(\d+(?:\.\d+)?)"
LINKS = f"{', '.join(NETWORKS)}, or LATENCY_US,RATE such as 500,50Mbit"


def link_named(text: str) -> Link:
    """Read a link such as `100Mbit`, `25GbE`, `free`, or `500,50Mbit`: microseconds and a line
    rate. Raises UsageError for any other text.
    """
    for name, link in NETWORKS.items():
        if _plain(name) == _plain(text):
            return link
    latency, _, rate = text.partition(",")
    bits = bits_per_second(rate)
    microseconds = float(latency) if re.fullmatch(_NUMBER, latency) else math.inf
    if microseconds == math.inf or bits is None:
        raise UsageError("unknown-choice", name="network", value=text, choices=LINKS)
    return Link(microseconds / 1e6, TCP * bits / 8)


def _plain(name: str) -> str:
    return name.lower().replace("gbe", "gbit")


def bits_per_second(rate: str) -> float | None:
    """Read a rate such as `100mbit`, `2.5Gbit` or `25GbE`; None if the text is no rate."""
    match = re.fullmatch(rf"{_NUMBER}(kbit|mbit|gbit|gbe)", rate.strip().lower())
    if match is None:
        return None
    number, unit = match.groups()
    return float(number) * _UNITS[unit] or None


def connection(text: str, per_node: int = 1) -> Network:
    """Read the option --network, for nodes with `per_node` ranks. The link connects the nodes;
    PCIe 3.0 then connects the ranks of a node. Raises UsageError for an invalid text.
    """
    link = link_named(text)
    within = link if per_node == 1 or math.isinf(link.bandwidth) else _PCIE
    return Network(within, link, per_node)


def described(network: Network, name: str) -> str:
    """Return a sentence with the rates and latencies of the network."""
    between = f"{name}: {_link(network.between)} a message"
    if network.ranks_per_node == 1:
        return between
    nodes = f"nodes of {network.ranks_per_node}"
    return f"{between} between {nodes}, inside {_link(network.within)}"


def _link(link: Link) -> str:
    """`1.5 Mbit/s, 100 us`, or `no limit, 0 us`"""
    return f"{_rate(8 * link.bandwidth)}, {1e6 * link.latency:.3g} us"


def _rate(bits: float) -> str:
    if math.isinf(bits):
        return "no limit"
    if bits >= 1e9:
        return f"{bits / 1e9:.3g} Gbit/s"
    return f"{bits / 1e6:.3g} Mbit/s"
