"""What connects devices inside a server and servers with each other: peaks, and the share that a
collective achieves; and networks by name.
"""

from __future__ import annotations

import math
import re

from lockstep.collectives.network import Link, Network
from lockstep.errors import UsageError

# Share of a network card's line rate. NCCL's maintainers count 12 GB/s for a card of 100 Gbit/s and
# 24 for 200 (NVIDIA/nccl-tests issue 119).
RDMA = 0.96
# 1448 bytes of payload in a frame of 1538 on the wire, preamble and gap included (Ethernet, MTU
# 1500, TCP with timestamps).
TCP = 0.94
# Share of NVLink's one-way peak in a ring of eight: NCCL's own tuning caps an A100 at 235 of 300
# GB/s (src/graph/tuning.cc, busBw of compute capability 8.0).
NVLINK = 0.78
# Share of PCIe 3.0 x16's 15.75 GB/s: 12 GB/s, what a network card of 100 Gbit/s, which NCCL counts
# as 12 GB/s, gets through such a slot.
PCIE = 0.76

# Seconds a step of a ring: NCCL's tuning tables (src/graph/tuning.cc, hwLat, Ring, Simple),
# versions 2.8 and later.
NVLINK_LATENCY = 3.4e-6
PCIE_LATENCY = 5.7e-6
RDMA_LATENCY = 14e-6

# Spread of the seconds that equal devices take for equal work, as standard deviation over mean.
# Sinha et al., 2022 (arXiv 2208.11035), abstract: 8 % of variation on the average over five
# clusters, between the whiskers of a box plot; those of a normal distribution are 5.4 deviations
# apart.
DEVICE_SPREAD = 0.08 / 5.4


def pcie(ranks: int, *, gbit: float) -> Network:
    """Servers of `ranks` devices on PCIe 3.0, with RDMA at `gbit` Gbit/s for each server."""
    return Network(
        Link(PCIE_LATENCY, PCIE * 15.75e9), Link(RDMA_LATENCY, RDMA * gbit * 1e9 / 8), ranks
    )


def nvlink(ranks: int, *, gigabytes: float, gbit: float) -> Network:
    """Servers of `ranks` devices with NVLink of `gigabytes` GB/s one way for each device, and
    RDMA at `gbit` Gbit/s for each server.
    """
    return Network(
        Link(NVLINK_LATENCY, NVLINK * gigabytes * 1e9),
        Link(RDMA_LATENCY, RDMA * gbit * 1e9 / 8),
        ranks,
    )


# One-way NVLink of a device, GB/s: data sheets give both directions together (P100 160, V100 300,
# A100 600, H100 and H200 900).
NVLINK_GIGABYTES = {"p100": 80.0, "v100": 150.0, "a100-80g": 300.0, "h100": 450.0, "h200": 450.0}

# Latencies are those of a TCP message between two processes on such a network, to the order of
# magnitude. Of the rate, what is payload.
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


def link_named(text: str) -> Link:
    """`100Mbit`, `25GbE`, `free`, or microseconds and a line's rate: `500,50Mbit`. Raises
    UsageError.
    """
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
