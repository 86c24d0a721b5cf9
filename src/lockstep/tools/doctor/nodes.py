"""Several nodes, as the ranks of a training meet on them: whoever has started this once for each
rank (Ray, a launcher on each node, srun, torchrun).

every node   says what it has
all ranks    add up; then each pair of nodes is measured, in both directions, while the others wait,
             and clocks are compared
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.collectives.group import Group
from lockstep.collectives.texts import said_by
from lockstep.launcher.fixed import towards
from lockstep.tools.doctor import host, links, network, software, sums
from lockstep.tools.doctor.examined import Examined
from lockstep.tools.finding import Finding, judged
from lockstep.world.world import World, init

_APART = 1.0  # seconds between two nodes' clocks from which logs and certificates become confusing
_SAME = ("Python", "torch", "system", "backends")
"""Findings that are one line where all nodes say the same, and are to be mended where they do
not.
"""


def main(json_file: Path | None) -> bool:
    """On every rank. The first prints the report, and writes it as JSON; whether the nodes are
    fit to train, on all of them.
    """
    with init() as world:
        found = examine(world)
        if world.rank == 0:
            print(found.text(), flush=True)
            if json_file is not None:
                from lockstep.tools.timing.output_files import write_json

                write_json(json_file, found.as_json())
    return found.fit


def examine(world: World) -> Examined:
    """A collective; what it returns is the same on all ranks."""
    own = [*software.findings(), *host.findings(world.local_size)]
    address = "127.0.0.1"
    with suppress(OSError, KeyError):
        address = towards(os.environ["MASTER_ADDR"])
    own.append(network.used(network.interfaces(), address, os.environ.get("GLOO_SOCKET_IFNAME")))
    mine = {
        "node": world.node,
        "name": socket.gethostname(),
        "found": [finding.as_json() for finding in own],
    }
    said: list[Any] = [
        said_by(rank, mine, world.control, "for what this node has") for rank in range(world.size)
    ]
    # the first rank of each node
    firsts = {each["node"]: rank for rank, each in reversed(list(enumerate(said)))}
    ranks = sorted(firsts.values())
    names = _named([said[rank]["name"] for rank in ranks])
    found = merged(
        dict(
            zip(
                names,
                ([Finding(**each) for each in said[rank]["found"]] for rank in ranks),
                strict=True,
            )
        )
    )
    found.append(
        sums.judge(
            sums.wrong(world.group, world.device, ["native"]), ["native"], world.size, "rank"
        )
    )
    measured: dict[str, Any] = {}
    if world.rank in ranks:
        one_each = world.subgroup(ranks)
        pairs = links.measure(one_each, names, world.device, hosts=True)
        measured = {"links": [link.as_json() for link in pairs], "clocks": clocks(one_each)}
    measured = said_by(ranks[0], measured, world.control, "for the links")
    pairs = [links.Link(**each) for each in measured["links"]]
    found += [
        links.judge(pairs, hosts=True),
        judge_clocks(dict(zip(names, measured["clocks"], strict=True))),
    ]
    return Examined(found, pairs)


def _named(names: Sequence[str]) -> list[str]:
    """Host names, with a number where a host stands for several nodes."""
    return [
        name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)
    ]


def merged(by_node: dict[str, list[Finding]]) -> list[Finding]:
    """One line a check where the nodes must say the same, else a line for each node."""
    lines: list[Finding] = []
    for column in zip(*by_node.values(), strict=True):
        values = {finding.value for finding in column}
        name = column[0].name
        if len(values) == 1 and all(finding.level == "ok" for finding in column):
            lines.append(column[0])
        elif name in _SAME:
            told = ", ".join(
                f"{finding.value} on {node}" for node, finding in zip(by_node, column, strict=True)
            )
            lines.append(
                judged(
                    name,
                    told,
                    fix=(
                        f"{name} differs between nodes ({told}): install the same version on every"
                        " node"
                    ),
                )
            )
        else:
            lines += [
                Finding(
                    name=name,
                    value=f"{node}: {finding.value}",
                    level=finding.level,
                    fix=finding.fix and f"{node}: {finding.fix}",
                )
                for node, finding in zip(by_node, column, strict=True)
            ]
    return lines


def clocks(group: Group) -> list[float]:
    """By how many seconds each rank's clock is ahead of rank 0's: the best of ten questions. All
    members call it.
    """
    offsets = torch.zeros(group.size, dtype=torch.float64)
    for rank in range(1, group.size):
        answer, best = torch.zeros(1, dtype=torch.float64), float("inf")
        for _ in range(10):
            if group.rank == 0:
                asked = time.time()
                group.send(answer, rank)
                group.receive(answer, rank)
                trip = time.time() - asked
                if trip < best:
                    best, offsets[rank] = trip, answer.item() - asked - trip / 2
            elif group.rank == rank:
                group.receive(answer, 0)
                group.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    group.all_reduce(offsets).wait()
    return [float(each) for each in offsets]


def judge_clocks(offsets: dict[str, float]) -> Finding:
    """Seconds ahead of the first node, by name."""
    value = ", ".join(f"{name} {1e3 * each:+.1f} ms" for name, each in list(offsets.items())[1:])
    apart = [f"{name} by {each:+.1f} s" for name, each in offsets.items() if abs(each) > _APART]
    warn = (
        f"clocks differ from {next(iter(offsets))}'s, {' and '.join(apart)}: have chrony or ntpd"
        " set them, or logs of different nodes cannot be compared"
        if apart
        else ""
    )
    return judged("clocks", value, warn=warn)


if __name__ == "__main__":
    import sys

    if not main(Path(sys.argv[1]) if sys.argv[1:] else None):
        sys.exit(1)
