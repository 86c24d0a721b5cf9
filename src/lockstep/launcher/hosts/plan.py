"""What the command line says about hosts, before anybody was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.launcher.generations import RESTARTS
from lockstep.launcher.hosts.interfaces import host_and_port

JOIN_SECONDS = 300.0
REACH_SECONDS = 6.0
"""How long the first host may take to be reached, where --join-timeout was not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The same on every host, but for `node_rank`."""

    least: int
    most: int
    meet: str
    """HOST[:PORT], as it was given."""
    token: Path | None = None
    node_rank: int | None = None
    workers: int | None = None
    """Ranks of each host. None: as many as it has GPUs, else one."""
    join_timeout: float | None = None
    restarts: int = 0
    after_stalls: bool = False
    """Whether a run that hung is begun anew as one of which a rank was killed."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name -> value of everything that must be the same on all hosts."""

    @property
    def elastic(self) -> bool:
        return self.least < self.most

    @property
    def nodes(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)

    @classmethod
    def read(
        cls,
        nodes: str | None,
        *,
        meet: str | None,
        node_rank: int | None,
        token: Path | None,
        workers: str | int | None,
        workers_per_node: int | None,
        join_timeout: float | None,
        restarts: int | None,
        after_stalls: bool = False,
    ) -> Plan | None:
        """Of the options; None for this host alone. Raises UsageError for what does not go together."""
        others: dict[str, object] = {
            "--meet": meet,
            "--node-rank": node_rank,
            "--token": token,
            "--workers-per-node": workers_per_node,
            "--join-timeout": join_timeout,
        }
        if nodes is None:
            given = [f"{name} {value}" for name, value in others.items() if value is not None]
            if given:
                raise UsageError(f"{given[0]} is about several hosts: give --nodes too, or leave it out")
            return None
        least, most = _numbers(nodes)
        if meet is None:
            raise UsageError(f"--nodes {nodes}: give --meet HOST[:PORT], the host on which the others shall meet, on every host alike")
        host_and_port(meet)
        if node_rank is not None and not 0 <= node_rank < most:
            raise UsageError(f"--node-rank {node_rank} does not lie in 0..{most - 1}, but --nodes is {nodes}: hosts count from 0")
        if join_timeout is not None and not join_timeout > 0:
            raise UsageError(f"--join-timeout {join_timeout:g}: give seconds, more than 0")
        return cls(
            least=least,
            most=most,
            meet=meet,
            token=token,
            node_rank=node_rank,
            workers=_share(workers, workers_per_node, least, most, nodes),
            join_timeout=join_timeout,
            restarts=(RESTARTS if least < most or after_stalls else 0) if restarts is None else restarts,
            after_stalls=after_stalls,
        )


def _numbers(nodes: str) -> tuple[int, int]:
    first, colon, last = nodes.partition(":")
    if not first.isdigit() or (colon and not last.isdigit()) or not 1 <= int(first) <= int(last or first):
        raise UsageError(f"--nodes {nodes}: give the number of hosts, or the least and the most as in 2:4")
    return int(first), int(last or first)


def _share(workers: str | int | None, per_node: int | None, least: int, most: int, nodes: str) -> int | None:
    """Ranks of each host."""
    if per_node is not None and per_node < 1:
        raise UsageError(f"--workers-per-node {per_node}: give at least 1")
    if workers is None:
        return per_node
    if per_node is not None:
        raise UsageError(f"--workers {workers} and --workers-per-node {per_node} exclude each other: give one")
    if least < most:
        raise UsageError(
            f"--workers {workers} are ranks over all hosts, but --nodes {nodes} leaves their number open: give --workers-per-node"
        )
    if not str(workers).isdigit() or int(workers) < 1:
        raise UsageError(
            f"--workers {workers} with --nodes {nodes}: give a number of ranks over all hosts, or --nodes N:M --workers-per-node"
        )
    if int(workers) % most:
        raise UsageError(
            f"--workers {workers} cannot be shared evenly by --nodes {nodes}: give a multiple of {most}, or --workers-per-node"
        )
    return int(workers) // most
