"""A fixed set of nodes, each of which starts this command: which of them is this one, and how many
ranks has each?

Said by options (--nodes, --node-rank, --rdzv-endpoint) or by the variables of torchrun, which
Kubeflow's TrainJob sets too (PET_*). Pure. Who speaks of several nodes is honoured or refused: a
run never trains alone because a number was missing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config.knob import value_of, whole
from lockstep.errors import UsageError
from lockstep.launcher.engine import LocalRanks
from lockstep.launcher.interfaces import host_and_port, towards
from lockstep.runtime.cores import cores
from lockstep.runtime.environment import check_rank
from lockstep.runtime.process_lifetime import PARENT

_PORT = "29400"
_KNOWN_WITHIN = 300.0  # seconds
_NODES = "PET_NNODES"
_EACH = "PET_NPROC_PER_NODE"
_RANK = "PET_NODE_RANK"
_HOST = "PET_MASTER_ADDR"
_AT = "PET_MASTER_PORT"
VARIABLES = (_NODES, _EACH, _RANK, _HOST, _AT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Equal on every node, but for `rank`."""

    count: int
    rank: int
    host: str
    """Of node 0, as all nodes know it."""
    port: int
    workers: int | None = None
    """Ranks of each node. None: as many as it has GPUs, else one."""

    @classmethod
    def read(
        cls,
        nodes: int | None,
        node_rank: int | None,
        endpoint: str | None,
        workers: str | int | None,
        env: Mapping[str, str],
    ) -> Nodes | None:
        """Of the options (`workers`: ranks over all nodes), else of `env`; None for one node.
        Raises UsageError for what does not add up.
        """
        if nodes is None:
            given = [
                f"{name} {value}"
                for name, value in (("--node-rank", node_rank), ("--rdzv-endpoint", endpoint))
                if value is not None
            ]
            if given:
                raise UsageError("incomplete-settings", given=given[0], lacking="--nodes")
            return _of_variables(workers, env)
        whole("--nodes", nodes)
        if node_rank is None or endpoint is None:
            lacking = " and ".join(
                name
                for name, value in (
                    ("--node-rank K", node_rank),
                    ("--rdzv-endpoint HOST:PORT", endpoint),
                )
                if value is None
            )
            raise UsageError("incomplete-settings", given=f"--nodes {nodes}", lacking=lacking)
        check_rank("--node-rank", node_rank, "--nodes", nodes)
        host, port = host_and_port(endpoint, "--rdzv-endpoint")
        return cls(
            count=nodes,
            rank=node_rank,
            host=host,
            port=port,
            workers=_share(workers, nodes, "--nodes"),
        )

    def address_here(self, seconds: float | None = None) -> str:
        """This node's address on the way to node 0, whose name may be unknown for a while, as that
        of a pod that is being started.

        Raises UsageError where there is no way within `seconds` (default: 300), and on node 0 where
        it cannot listen there.
        """
        until = time.monotonic() + (seconds or _KNOWN_WITHIN)
        try:
            while True:
                try:
                    family, _, _, _, there = socket.getaddrinfo(
                        self.host, self.port, type=socket.SOCK_STREAM
                    )[0]
                    break
                except socket.gaierror:
                    if self.rank == 0 or time.monotonic() > until:
                        raise
                    time.sleep(1.0)
            if self.rank > 0:
                return towards(str(there[0]))
            socket.create_server(there[:2], family=family).close()
            return str(there[0])
        except OSError as error:
            code = "node-0-cannot-listen" if self.rank == 0 else "node-0-unreachable"
            raise UsageError(
                code,
                node=self.rank,
                address=f"{self.host}:{self.port}",
                seconds=seconds or _KNOWN_WITHIN,
                why=error.strerror,
            ) from None

    def ranks(self, here: int) -> LocalRanks:
        """Of this node, which has `here` ranks, as the others have."""
        return LocalRanks(
            count=here,
            first_rank=self.rank * here,
            size=self.count * here,
            node=self.rank,
            nodes=self.count,
            address=self.host,
            port=self.port,
        )


def _of_variables(workers: str | int | None, env: Mapping[str, str]) -> Nodes | None:
    found = {name: env[name].strip() for name in VARIABLES if env.get(name, "").strip()}
    if not found or PARENT in env:  # a rank's own commands are about its node
        return None
    if _NODES not in found:
        if (name := next((name for name in (_RANK, _HOST) if name in found), None)) is not None:
            raise UsageError("incomplete-settings", given=f"{name}={found[name]}", lacking=_NODES)
        return None
    count = whole(_NODES, value_of(found[_NODES]))
    asked_for = found.get(_EACH, "auto")
    each = (
        None
        if asked_for in ("auto", "gpu")
        else cores()
        if asked_for == "cpu"
        else whole(_EACH, value_of(asked_for))
    )
    if count > 1 and (lacking := [name for name in (_RANK, _HOST) if name not in found]):
        raise UsageError(
            "incomplete-settings", given=f"{_NODES}={count}", lacking=" and ".join(lacking)
        )
    rank = whole(_RANK, value_of(found.get(_RANK, "0")), least=0)
    check_rank(_RANK, rank, _NODES, count)
    asked = _share(workers, count, _NODES)
    if asked is not None and each is not None and asked != each:
        raise UsageError(
            "workers-differ-from-variables",
            workers=workers,
            nodes_name=_NODES,
            nodes=count,
            share=asked,
            each_name=_EACH,
            each=each,
        )
    host, port = host_and_port(
        f"{found.get(_HOST, '127.0.0.1')}:{found.get(_AT, _PORT)}", f"{_HOST} and {_AT}"
    )
    return Nodes(count=count, rank=rank, host=host, port=port, workers=each or asked)


def _share(workers: str | int | None, nodes: int, name: str) -> int | None:
    """Ranks of each node, of `workers` over all."""
    if workers is None:
        return None
    text = str(workers)
    if not text.isdigit() or int(text) < 1 or int(text) % nodes:
        raise UsageError("workers-not-divisible", workers=text, nodes=nodes, name=name)
    return int(text) // nodes
