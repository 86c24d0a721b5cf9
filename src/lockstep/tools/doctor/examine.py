"""Examine this host alone, or several nodes with one process per rank, as in a training. Any
launcher may start these processes (Ray, one on each node, srun, torchrun).

each node    reports its findings
all ranks    check the results of collectives; then each pair of nodes is measured in both
             directions, while the others wait, and the clocks of nodes are compared
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep import World, collectives, init, launch
from lockstep.collectives import Group
from lockstep.collectives.broadcast_json import said_by
from lockstep.errors import LaunchTimeout, WorkerFailed
from lockstep.runtime.interfaces import towards
from lockstep.tools.doctor import host, links
from lockstep.tools.doctor.links import MeasuredLink
from lockstep.tools.finding import Finding, judged
from lockstep.tools.timing.output_files import counted


@dataclass(frozen=True, slots=True)
class Examined:
    """The findings and the measured links of one host or several."""

    findings: Sequence[Finding]
    links: Sequence[MeasuredLink]

    @property
    def fit(self) -> bool:
        return all(finding.level != "fix" for finding in self.findings)

    def text(self) -> str:
        """Return one line per check, the table of links, and the verdict."""
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level:<6}{finding.name:<12}{finding.value}")
        if self.links:
            lines += ["", links.squares(self.links)]
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        """Return the warnings, then "fit to train" or what to fix."""
        lines = []
        fixes: list[str] = []
        for finding in self.findings:
            if finding.level == "warn":
                lines.append(f"warning: {finding.name}: {finding.fix}")
            elif finding.level == "fix":
                fixes.append(f"{len(fixes) + 1}. {finding.name}: {finding.fix}")
        if fixes:
            lines += [f"not fit to train: {counted(len(fixes), 'thing')} to fix", *fixes]
        else:
            lines.append("fit to train")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {"fit": self.fit, **asdict(self)}


_ELEMENTS = 10_007  # a prime, so that the ranks' parts differ in size


def wrong_sums(group: Group, device: torch.device, algorithms: Sequence[str]) -> list[str]:
    """Return the collectives with a wrong result on any rank, such as "all_reduce by native". All
    members must call it, and all get the result.
    """
    # Sums of small integers are exact.
    pattern = torch.arange(_ELEMENTS, dtype=torch.float32, device=device).remainder_(61)
    inputs = [pattern * (rank + 1) + rank for rank in range(group.size)]
    total = torch.stack(inputs).sum(0)
    expected = {
        "all_reduce": total,
        "broadcast": inputs[-1],
        "all_gather": torch.cat(inputs),
        "reduce_scatter": total.tensor_split(group.size)[group.rank],
    }
    wrong = {}
    for algorithm in algorithms:
        for kind, right in expected.items():
            root = {"root": group.size - 1} if kind == "broadcast" else {}
            run = partial(getattr(collectives, kind), algorithm=algorithm, group=group, **root)
            result = run(inputs[group.rank].clone())
            wrong[f"{kind} by {algorithm}"] = float(not torch.equal(result, right))
    flags = torch.tensor(list(wrong.values()), device=device)
    group.all_reduce(flags, "max").wait()
    return [name for name, flag in zip(wrong, flags.tolist(), strict=True) if flag]


def judge_sums(bad: Sequence[str], algorithms: Sequence[str], members: int, member: str) -> Finding:
    """Judge the result of `wrong_sums`. `member` is "rank" or "host"."""
    value = (
        "all_reduce, broadcast, all_gather, reduce_scatter over"
        f" {counted(members, member)} by {' and '.join(algorithms)}"
    )
    if not bad:
        return judged("sums", value)
    fix = (
        f"{', '.join(bad)} gave wrong numbers: do not train here. Test the memory and the network"
        " card, and try another torch"
    )
    return judged("sums", value, fix=fix)


_PATIENCE = timedelta(seconds=120)  # to start ranks and measure, on a busy machine


def examine_host(workers: int) -> Examined:
    """Examine this host, and start `workers` ranks on it."""
    findings = [
        *host.installation(),
        *host.findings(workers),
        host.own_name(socket.gethostname(), host.addresses_of),
        host.used(host.interfaces(), "127.0.0.1", os.environ.get("GLOO_SOCKET_IFNAME")),
        host.loopback_port(),
    ]
    try:
        bad, algorithms, pairs = launch(_on_rank, workers, timeout=_PATIENCE)[0]
    except (WorkerFailed, LaunchTimeout) as error:
        value = f"{workers} ranks did not finish this check"
        return Examined([*findings, judged("sums", value, fix=str(error))], [])
    findings.append(judge_sums(bad, algorithms, workers, "rank"))
    findings.append(links.judge(pairs, hosts=False))
    return Examined(findings, pairs)


def _on_rank() -> tuple[list[str], list[str], list[MeasuredLink]]:
    workers = int(os.environ["WORLD_SIZE"])
    gpu_for_each = torch.cuda.is_available() and torch.cuda.device_count() >= workers
    with init(backend="nccl" if gpu_for_each else "gloo") as world:
        algorithms = ["native"]
        if world.group.memory is not None:
            algorithms.append("shared_memory")
        bad = wrong_sums(world.group, world.device, algorithms)
        names = [f"rank {rank}" for rank in range(world.size)]
        return bad, algorithms, links.measure(world.group, names, world.device, hosts=False)


_APART = 1.0  # seconds between two nodes' clocks from which logs and certificates become confusing
_SAME = ("Python", "torch", "system", "backends")
"""Findings that must be the same on all nodes."""


def main(json_file: Path | None) -> bool:
    """Examine the nodes; every rank calls it. Rank 0 prints the report and writes it as JSON.
    Return on all ranks whether the nodes are fit to train.
    """
    with init() as world:
        examined = examine_nodes(world)
        if world.rank == 0:
            print(examined.text(), flush=True)
            if json_file is not None:
                from lockstep.tools.timing.output_files import write_json

                write_json(json_file, examined.as_json())
    return examined.fit


def examine_nodes(world: World) -> Examined:
    """Examine the nodes. All ranks must call it, and all get the same result."""
    address = "127.0.0.1"
    with suppress(OSError, KeyError):
        address = towards(os.environ["MASTER_ADDR"])
    own = [*host.installation(), *host.findings(world.local_size)]
    own.append(host.used(host.interfaces(), address, os.environ.get("GLOO_SOCKET_IFNAME")))
    report = {
        "node": world.node,
        "name": socket.gethostname(),
        "found": [asdict(finding) for finding in own],
    }
    reports: dict[int, Any] = {}  # of the first rank of each node, by its rank
    nodes = set()
    for rank in range(world.size):
        received: Any = said_by(rank, report, world.control, "for what this node has")
        if received["node"] not in nodes:
            nodes.add(received["node"])
            reports[rank] = received
    first_ranks = list(reports)
    names = _named([received["name"] for received in reports.values()])
    by_node = {}
    for name, received in zip(names, reports.values(), strict=True):
        by_node[name] = [Finding(**fields) for fields in received["found"]]
    findings = merged(by_node)
    bad = wrong_sums(world.group, world.device, ["native"])
    findings.append(judge_sums(bad, ["native"], world.size, "rank"))
    measured: dict[str, Any] = {}
    if world.rank in first_ranks:
        one_each = world.subgroup(first_ranks)
        pairs = links.measure(one_each, names, world.device, hosts=True)
        measured = {"links": [asdict(link) for link in pairs], "clocks": clocks(one_each)}
    measured = said_by(first_ranks[0], measured, world.control, "for the links")
    pairs = [MeasuredLink(**fields) for fields in measured["links"]]
    findings.append(links.judge(pairs, hosts=True))
    findings.append(judge_clocks(dict(zip(names, measured["clocks"], strict=True))))
    return Examined(findings, pairs)


def _named(names: Sequence[str]) -> list[str]:
    """Return the host names, with a number if several nodes have the same host name."""
    distinct = []
    for number, name in enumerate(names):
        distinct.append(name if names.count(name) == 1 else f"{name}-{number}")
    return distinct


def merged(by_node: dict[str, list[Finding]]) -> list[Finding]:
    """Return one line for a check on which all nodes agree or must agree, else one per node."""
    lines: list[Finding] = []
    for column in zip(*by_node.values(), strict=True):
        name = column[0].name
        on_nodes = list(zip(by_node, column, strict=True))
        same = len({finding.value for finding in column}) == 1
        if same and (name in _SAME or all(finding.level == "ok" for finding in column)):
            lines.append(column[0])
        elif name in _SAME:
            values = ", ".join(f"{finding.value} on {node}" for node, finding in on_nodes)
            fix = f"{name} differs between nodes ({values}): install the same version on every node"
            lines.append(judged(name, values, fix=fix))
        else:
            for node, finding in on_nodes:
                value = f"{node}: {finding.value}"
                fix = finding.fix and f"{node}: {finding.fix}"
                lines.append(replace(finding, value=value, fix=fix))
    return lines


def clocks(group: Group) -> list[float]:
    """Return how many seconds each rank's clock is ahead of rank 0's, from the shortest of ten
    round trips. All members must call it.
    """
    offsets = torch.zeros(group.size, dtype=torch.float64)
    for rank in range(1, group.size):
        answer = torch.zeros(1, dtype=torch.float64)
        shortest = float("inf")
        for _ in range(10):
            if group.rank == 0:
                begin = time.time()
                group.send(answer, rank)
                group.receive(answer, rank)
                trip = time.time() - begin
                if trip < shortest:
                    shortest = trip
                    offsets[rank] = answer.item() - begin - trip / 2
            elif group.rank == rank:
                group.receive(answer, 0)
                group.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    group.all_reduce(offsets).wait()
    return [float(offset) for offset in offsets]


def judge_clocks(offsets: dict[str, float]) -> Finding:
    """Judge the clocks. `offsets` are seconds ahead of the first node, by node."""
    first, *others = offsets
    value = ", ".join(f"{name} {1e3 * offsets[name]:+.1f} ms" for name in others)
    apart = [
        f"{name} by {offset:+.1f} s" for name, offset in offsets.items() if abs(offset) > _APART
    ]
    if not apart:
        return judged("clocks", value)
    warn = (
        f"clocks differ from {first}'s, {' and '.join(apart)}: run chrony or ntpd on all nodes, so"
        " that their logs can be compared"
    )
    return judged("clocks", value, warn=warn)


if __name__ == "__main__":
    import sys

    if not main(Path(sys.argv[1]) if sys.argv[1:] else None):
        sys.exit(1)
