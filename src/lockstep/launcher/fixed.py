"""A fixed set of nodes, each of which starts this command: which node is this one, and how many
ranks does each node have?

Options (--nodes, --node-rank, --rdzv-endpoint) or the variables of torchrun give these numbers.
Kubeflow's TrainJob sets these too (PET_*). If only some of them are given, the command fails: a run
never trains alone because a number was missing.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from lockstep.config.knob import value_of, whole
from lockstep.errors import UsageError
from lockstep.launcher.engine import LocalRanks
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
        options = {"--nodes": nodes, "--node-rank": node_rank, "--rdzv-endpoint": endpoint}
        if not _complete(options):
            return _of_variables(workers, env)
        assert nodes is not None
        assert node_rank is not None
        check_rank("node_rank", node_rank, "nodes", nodes)
        host, port = host_and_port(str(endpoint), "--rdzv-endpoint")
        share = _share(workers, nodes, "--nodes")
        return cls(count=nodes, rank=node_rank, host=host, port=port, workers=share)

    def address_here(self, seconds: float | None = None) -> str:
        """Return this node's address on the way to node 0. Node 0's name may be unknown for a
        while, for example while its pod starts.

        Raises UsageError if there is no way within `seconds` (default: 300), or if node 0 cannot
        listen there.
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
        """Return this node's ranks. `here` is the number of ranks on each node."""
        return LocalRanks(
            count=here,
            first_rank=self.rank * here,
            size=self.count * here,
            node=self.rank,
            nodes=self.count,
            address=self.host,
            port=self.port,
        )


def _complete(values: Mapping[str, object]) -> bool:
    """Whether the values are given. Raises UsageError if only some of them are."""
    given = {name: value for name, value in values.items() if value is not None}
    lacking = [name for name in values if name not in given]
    if given and lacking:
        name, value = next(iter(given.items()))
        shown = f"{name} {value}" if name.startswith("-") else f"{name}={value}"
        raise UsageError("incomplete-settings", given=shown, lacking=" and ".join(lacking))
    return bool(given)


def _of_variables(workers: str | int | None, env: Mapping[str, str]) -> Nodes | None:
    found = {name: env[name].strip() for name in VARIABLES if env.get(name, "").strip()}
    if PARENT in env:  # a command that a rank starts is about the rank's own node
        return None
    if found.get(_NODES) == "1":
        found = {_RANK: "0", _HOST: "127.0.0.1", **found}
    if not _complete({name: found.get(name) for name in (_NODES, _RANK, _HOST)}):
        return None
    count, rank = (whole(name, value_of(found[name]), -math.inf) for name in (_NODES, _RANK))
    check_rank(_RANK, rank, _NODES, count)
    asked_for = found.get(_EACH, "auto")
    each = None
    if asked_for == "cpu":
        each = cores()
    elif asked_for not in ("auto", "gpu"):
        each = whole(_EACH, value_of(asked_for))
    share = _share(workers, count, _NODES)
    if share is not None and each is not None and share != each:
        raise UsageError(
            "workers-differ-from-variables",
            workers=workers,
            nodes_name=_NODES,
            nodes=count,
            share=share,
            each_name=_EACH,
            each=each,
        )
    host, port = host_and_port(f"{found[_HOST]}:{found.get(_AT, _PORT)}", f"{_HOST} and {_AT}")
    return Nodes(count=count, rank=rank, host=host, port=port, workers=each or share)


def _share(workers: str | int | None, nodes: int, name: str) -> int | None:
    """Return the ranks per node, for `workers` ranks over all nodes."""
    if workers is None:
        return None
    text = str(workers)
    if not text.isdigit() or int(text) < 1 or int(text) % nodes:
        raise UsageError("workers-not-divisible", workers=text, nodes=nodes, name=name)
    return int(text) // nodes


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this address; None if there is none."""
    return next(
        (
            name
            for name, found in psutil.net_if_addrs().items()
            for each in found
            if each.address == address
        ),
        None,
    )


def towards(peer: str) -> str:
    """Return this host's address on the interface over which packets go to `peer`. Sends nothing.
    Raises OSError if there is no route.
    """
    family, kind, _, _, there = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(there)
        return str(way.getsockname()[0])


def gloo_and_nccl(address: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return variables for ranks that make gloo and NCCL use the interface with `address`. A
    variable that `env` already sets is left out.
    """
    interface = interface_of(address)
    names = (
        {}
        if interface is None
        else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    )
    return {name: value for name, value in names.items() if name not in env}


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
