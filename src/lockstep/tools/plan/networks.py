"""Networks between devices: by name, by latency and rate, from a file of measurements, and those of
servers with NVLink or PCIe. Holds peak rates, and the share of them that collectives achieve.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.collectives.network import Link, Network
from lockstep.config.knob import value_of
from lockstep.errors import UsageError
from lockstep.tools.plan.carriers import OneHost, cost
from lockstep.tools.timing.hockney import fit
from lockstep.tools.timing.output_files import reading

# Share of a network card's line rate. NCCL's maintainers count 12 GB/s for a card of 100 Gbit/s and
# 24 for 200 (NVIDIA/nccl-tests issue 119).
RDMA = 0.96
# 1448 bytes of payload in a frame of 1538 on the wire, preamble and gap included (Ethernet, MTU
# 1500, TCP with timestamps).
TCP = 0.94
# Share of NVLink's one-way peak in a ring of eight: NCCL's own tuning caps an A100 at 235 of 300
# GB/s (src/graph/tuning.cc, busBw of compute capability 8.0).
NVLINK = 0.78
# Share of PCIe 3.0 x16's 15.75 GB/s: a network card of 100 Gbit/s, which NCCL counts as 12 GB/s,
# gets 12 GB/s through such a slot.
PCIE = 0.76

# Seconds per round of a ring: NCCL's tuning tables (src/graph/tuning.cc, hwLat, Ring, Simple),
# versions 2.8 and later.
NVLINK_LATENCY = 3.4e-6
PCIE_LATENCY = 5.7e-6
RDMA_LATENCY = 14e-6

# Standard deviation of the time that equal devices take for equal work, divided by the mean.
# Sinha et al., 2022 (arXiv 2208.11035), abstract: 8 % of variation on average over five clusters,
# between the whiskers of a box plot. Those of a normal distribution are 5.4 deviations apart.
DEVICE_SPREAD = 0.08 / 5.4


def pcie(ranks: int, *, gbit: float) -> Network:
    """Return the network of servers with `ranks` devices on PCIe 3.0, and RDMA at `gbit` Gbit/s per
    server.
    """
    return Network(_PCIE, _rdma(gbit), ranks)


def nvlink(ranks: int, *, gigabytes: float, gbit: float) -> Network:
    """Return the network of servers with `ranks` devices on NVLink, `gigabytes` GB/s one way per
    device, and RDMA at `gbit` Gbit/s per server.
    """
    return Network(Link(NVLINK_LATENCY, NVLINK * gigabytes * 1e9), _rdma(gbit), ranks)


def _rdma(gbit: float) -> Link:
    return Link(RDMA_LATENCY, RDMA * gbit * 1e9 / 8)


# One-way NVLink of a device, GB/s: data sheets give both directions together (P100 160, V100 300,
# A100 600, H100 and H200 900).
NVLINK_GIGABYTES = {"p100": 80.0, "v100": 150.0, "a100-80g": 300.0, "h100": 450.0, "h200": 450.0}

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
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "gbe": 1e9}
_NUMBER = r"(\d+(?:\.\d+)?)"
LINKS = f"{', '.join(NETWORKS)}, or LATENCY_US,RATE such as 500,50Mbit"
HERE = "here"
NVLINK_AND_IB = "NVLink+IB"
CHOICES = (
    f"{HERE}, {NVLINK_AND_IB}, {LINKS}, or a file that `lockstep bench collectives --json` wrote"
)
# Gbit/s of a network card; one card per GPU, as in NVIDIA's DGX H100 (data sheet: eight ConnectX-7
# for compute)
_NDR = 400.0
_PCIE = Link(PCIE_LATENCY, PCIE * 15.75e9)


def link_named(text: str, choices: str = LINKS) -> Link:
    """Read a link such as `100Mbit`, `25GbE`, `free`, or `500,50Mbit`: microseconds and a line
    rate. Raises UsageError for any other text.
    """
    named = {name.lower(): link for name, link in NETWORKS.items()}
    if text.lower() in named:
        return named[text.lower()]
    latency, _, rate = text.partition(",")
    microseconds, bits = value_of(latency), bits_per_second(rate)
    if isinstance(microseconds, str) or not 0 <= microseconds < math.inf or bits is None:
        raise UsageError("unknown-choice", name="network", value=text, choices=choices)
    return Link(microseconds / 1e6, TCP * bits / 8)


def bits_per_second(rate: str) -> float | None:
    """Read a rate such as `100mbit`, `2.5Gbit` or `25GbE`; None if the text is no rate."""
    found = re.fullmatch(rf"{_NUMBER}(kbit|mbit|gbit|gbe)", rate.strip().lower())
    return (float(found[1]) * _UNITS[found[2]] or None) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanNetwork:
    """The network of a plan, and its error."""

    network: Network | OneHost
    native: tuple[str, ...] = ("ring",)
    """Schedules that model the backend's own all-reduce."""
    error: float = 0.0
    """Relative error of a fit to measured times; 0 without a fit."""
    words: str
    """Description for people."""

    @property
    def links(self) -> Network:
        """The network between hosts; not for ranks measured on this host."""
        assert isinstance(self.network, Network)
        return self.network


def connection(text: str, per_node: int = 1) -> PlanNetwork:
    """Read the option --network, for nodes with `per_node` ranks. A named Ethernet connects the
    nodes; PCIe 3.0 then connects the ranks of a node. Raises UsageError for an invalid text.
    """
    if text.lower() == NVLINK_AND_IB.lower():
        network = nvlink(per_node, gigabytes=NVLINK_GIGABYTES["h100"], gbit=per_node * _NDR)
        return PlanNetwork(
            network=network,
            native=("ring", "halving_doubling"),
            words=_words(network, NVLINK_AND_IB),
        )
    file = Path(text)
    if file.is_file() or file.suffix == ".json":
        return from_file(file, per_node)
    link = link_named(text, CHOICES)
    within = link if per_node == 1 or math.isinf(link.bandwidth) else _PCIE
    network = Network(within, link, per_node)
    return PlanNetwork(network=network, words=_words(network, text))


def from_file(file: Path, per_node: int = 1) -> PlanNetwork:
    """Fit a link to the all-reduces of a file: those of the backend, which is assumed to use a
    ring; if there are none, those of Lockstep's algorithms. Raises UsageError.
    """
    rows = _rows(file)
    native = [row for row in rows if row["algorithm"] == "native"]
    points = []
    for row in native or rows:
        unit = Network.flat(1.0, 1.0)
        of = cost(
            unit,
            "all_reduce",
            "ring" if row["algorithm"] == "native" else row["algorithm"],
            int(row["workers"]),
        )
        points.append((of.latency, of.per_byte * row["size"], float(row["p50"])))
    line = fit(points)
    link = Link(line.first, 1 / line.second if line.second else math.inf)
    network = Network(_PCIE if per_node > 1 else link, link, per_node)
    return PlanNetwork(
        network=network,
        error=line.error,
        words=_words(network, f"{file}, fitted to {100 * line.error:.0f} %"),
    )


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the all-reduces among several ranks, by algorithms that have a schedule."""
    with reading(file, "--network", "lockstep bench collectives --json") as written:
        found = [
            row
            for row in written["rows"]
            if row["collective"] == "all_reduce"
            and row["workers"] > 1
            and row["p50"] > 0
            and row["algorithm"] not in ("auto", "shared_memory", "hierarchical")
            and row["size"] > 0
        ]
    if not found:
        raise UsageError("no-all-reduce-measured", file=str(file))
    return found


def _words(network: Network, name: str) -> str:
    between = f"{name}: {_rate(network.between)}, {1e6 * network.between.latency:.3g} us a message"
    if network.ranks_per_node == 1:
        return between
    inside = f"inside {_rate(network.within)}, {1e6 * network.within.latency:.3g} us"
    return f"{between} between nodes of {network.ranks_per_node}, {inside}"


def _rate(link: Link) -> str:
    if math.isinf(link.bandwidth):
        return "no limit"
    bits = 8 * link.bandwidth
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
