"""A fixed set of nodes, each of which starts this command: which node is this one, and how many
ranks does each node have?

Options (--nodes, --node-rank, --rdzv-endpoint) or the variables of torchrun give these numbers.
Kubeflow's TrainJob sets these too (PET_*). If only some of them are given, the command fails: a run
never trains alone because a number was missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.knob import value_of, whole
from lockstep.errors import UsageError
from lockstep.runtime.cores import cores
from lockstep.runtime.environment import check_rank
from lockstep.runtime.interfaces import address_of, towards
from lockstep.runtime.process_lifetime import PARENT

_KNOWN_WITHIN = 300.0  # seconds
_NODES = "PET_NNODES"
_PER_NODE = "PET_NPROC_PER_NODE"
_RANK = "PET_NODE_RANK"
_HOST = "PET_MASTER_ADDR"
_PORT = "PET_MASTER_PORT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The nodes of a run. Equal on every node, except for `rank`."""

    count: int
    rank: int
    host: str
    """The host of node 0, as all nodes know it."""
    port: int
    workers: int | None = None
    """Ranks per node. None: as many as the node has GPUs, else one."""

    @classmethod
    def read(
        cls,
        nodes: int | None,
        node_rank: int | None,
        endpoint: str | None,
        workers: str | int | None,
        env: Mapping[str, str],
    ) -> Nodes | None:
        """Read the options (`workers`: ranks over all nodes), else `env`; None for one node. Raises
        UsageError if they are incomplete or contradict each other.
        """
        values: dict[str, Any] = {
            "--nodes": nodes,
            "--node-rank": node_rank,
            "--rdzv-endpoint": endpoint,
        }
        per_node = None
        if not _set_values(values):
            if PARENT in env:  # a command that a rank starts is about the rank's own node
                return None
            values = _variables(env)
            per_node = _ranks_per_node(env)
        is_set = _set_values(values)
        if not is_set:
            return None
        lacking = [name for name in values if name not in is_set]
        if lacking:
            name, value = next(iter(is_set.items()))
            written = f"{name} {value}" if name.startswith("-") else f"{name}={value}"
            raise UsageError("incomplete-settings", given=written, lacking=" and ".join(lacking))
        (nodes_name, count), (rank_name, rank), (endpoint_name, address) = values.items()
        check_rank(rank_name, rank, nodes_name, count)
        share = _share(workers, count, nodes_name)
        if share is not None and per_node is not None and share != per_node:
            raise UsageError(
                "workers-differ-from-variables",
                workers=workers,
                nodes_name=nodes_name,
                nodes=count,
                share=share,
                each_name=_PER_NODE,
                each=per_node,
            )
        if endpoint_name == _HOST:
            address = f"{address}:{env.get(_PORT, '').strip() or 29400}"
        host, port = host_and_port(address, endpoint_name)
        return cls(count=count, rank=rank, host=host, port=port, workers=per_node or share)

    def address_here(self, seconds: float | None = None) -> str:
        """Return this node's address on the way to node 0; on node 0, its own. Node 0's name may be
        unknown for a while, for example while its pod starts.

        Raises UsageError if there is no way within `seconds` (default: 300).
        """
        within = seconds or _KNOWN_WITHIN
        deadline = time.monotonic() + within
        while True:
            try:
                address = address_of(self.host, self.port)
                return address if self.rank == 0 else towards(address)
            except OSError as error:
                if self.rank == 0 or time.monotonic() > deadline:
                    raise UsageError(
                        "node-0-unreachable",
                        node=self.rank,
                        address=f"{self.host}:{self.port}",
                        seconds=within,
                        why=error.strerror,
                    ) from None
            time.sleep(1.0)


def _variables(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the number of nodes, the node's rank and the endpoint, by the variables' names."""
    nodes = env.get(_NODES, "").strip()
    rank = env.get(_RANK, "").strip()
    host = env.get(_HOST, "").strip()
    if nodes == "1":
        rank = rank or "0"
        host = host or "127.0.0.1"
    return {
        _NODES: whole(_NODES, value_of(nodes)) if nodes else None,
        _RANK: whole(_RANK, value_of(rank), -math.inf) if rank else None,
        _HOST: host or None,
    }


def _ranks_per_node(env: Mapping[str, str]) -> int | None:
    """Return torchrun's --nproc-per-node; None for as many as a node has GPUs."""
    text = env.get(_PER_NODE, "").strip()
    if text in ("", "auto", "gpu"):
        return None
    return cores() if text == "cpu" else whole(_PER_NODE, value_of(text))


def _set_values(values: Mapping[str, object]) -> dict[str, object]:
    """Return the options or variables that are set."""
    return {name: value for name, value in values.items() if value is not None}


def _share(workers: str | int | None, nodes: int, name: str) -> int | None:
    """Return the ranks per node, for `workers` ranks over all nodes."""
    if workers is None:
        return None
    text = str(workers)
    if not text.isdigit() or int(text) < 1 or int(text) % nodes:
        raise UsageError("workers-not-divisible", workers=text, nodes=nodes, name=name)
    return int(text) // nodes


def host_and_port(text: str, option: str) -> tuple[str, int]:
    """Parse `node1:29400` or `[fd00::1]:29400`. Raises a UsageError that names `option` for
    anything else.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    named = colon and host and (":" not in host or "[" in text)
    if not named or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UsageError("not-an-endpoint", name=option, value=text)
    return host, int(port)
