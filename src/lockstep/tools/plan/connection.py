"""What connects the ranks of a plan: a network by name, one that `lockstep bench collectives`
measured, or this host, measured now.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.collectives.network import Link, Network
from lockstep.errors import UsageError
from lockstep.tools.plan.carriers import OneHost, cost
from lockstep.tools.plan.fabrics import CHOICES as LINKS
from lockstep.tools.plan.fabrics import NVLINK_GIGABYTES, PCIE, PCIE_LATENCY, link_named, nvlink
from lockstep.tools.timing.hockney import fit

HERE = "here"
NVLINK_AND_IB = "NVLink+IB"
CHOICES = (
    f"{HERE}, {NVLINK_AND_IB}, {LINKS}, or a file that `lockstep bench collectives --json` wrote"
)
# Gbit/s of a card; one a GPU, as in NVIDIA's DGX H100 (data sheet: eight ConnectX-7 for compute)
_NDR = 400.0
_PCIE = Link(PCIE_LATENCY, PCIE * 15.75e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanNetwork:
    """A network, and how sure it is."""

    network: Network | OneHost
    native: tuple[str, ...] = ("ring",)
    """What stands for the backend's own all-reduce."""
    error: float = 0.0
    """Of a fit: by how much of itself a measured time lay beside it."""
    words: str

    @property
    def links(self) -> Network:
        """Of ranks that are elsewhere: what has a name, or stands in a file."""
        assert isinstance(self.network, Network)
        return self.network


def connection(text: str, per_node: int = 1) -> PlanNetwork:
    """Of nodes with so many ranks. A name of an Ethernet is what leaves a node; its ranks are
    then joined by PCIe 3.0. Raises UsageError.
    """
    if per_node < 1:
        raise UsageError(f"--nodes-of {per_node}: a node has at least 1 rank")
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
    try:
        link = link_named(text)
    except UsageError:
        raise UsageError(f"--network {text} is unknown: choose one of {CHOICES}") from None
    within = link if per_node == 1 or math.isinf(link.bandwidth) else _PCIE
    network = Network(within, link, per_node)
    return PlanNetwork(network=network, words=_words(network, text))


def from_file(file: Path, per_node: int = 1) -> PlanNetwork:
    """A line through the all-reduces of a file: those of the backend, which is taken to go round
    a ring, else of all our own. Raises UsageError.
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
    """All-reduces among more than one rank, by algorithms that have a schedule."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        found = [
            row
            for row in rows
            if row["collective"] == "all_reduce" and row["workers"] > 1 and row["p50"] > 0
        ]
        found = [
            row
            for row in found
            if row["algorithm"] not in ("auto", "shared_memory", "hierarchical") and row["size"] > 0
        ]
    except OSError as error:
        raise UsageError(f"--network {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"--network {file} is not what `lockstep bench collectives --json` writes"
        ) from None
    if not found:
        raise UsageError(
            f"--network {file} has no all-reduce of more than one rank: measure with `lockstep"
            f" bench collectives --workers 2 --json {file}`"
        )
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
