"""Bind each rank of a host to physical cores of its own.

    node 0   cores 0 1 2 3     rank 0: 0 1    rank 1: 2 3
    node 1   cores 4 5 6 7     rank 2: 4 5    rank 3: 6 7

The kernel takes a page of memory from the NUMA node of the core that touches it first. So a rank is
bound before it allocates anything. Its threads, loader workers and other children inherit its
cores. The launcher decides (`binding`), because only it sees the host before the ranks keep it busy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.launching import Bind
from lockstep.runtime.cores import cores, quota, running
from lockstep.runtime.streams import spans

SYSTEM = Path("/sys/devices/system")
"""Where Linux describes the cores and nodes of this host."""
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""Files that exist where this host has GPUs."""
_SET_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

# One core in so many may be busy with other programs: a large host is never quite idle, and its
# ranks would be bound in one run and not in the next.
_SPARE = 8

Core = frozenset[int]
"""A physical core: the numbers of those of its hardware threads that this process may use."""
Node = Sequence[Core]
"""The physical cores of a NUMA node, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The cores of each rank of this host."""

    nodes: Sequence[Node]
    shares: Sequence[Collection[int]] = ()
    """The cores of each rank, by local rank. Empty: no rank is bound."""
    reason: str = ""
    """Why no rank is bound; "" if they are."""

    def cores_of(self, rank: int) -> str:
        """Return the cores of a local rank as text, such as "0-3,8"."""
        return spans(self.shares[rank])


def shares(ranks: int, bind: Bind) -> Sequence[Collection[int]]:
    """Return the cores of each of this host's `ranks` ranks; nothing if they are not bound."""
    return () if bind == "none" else binding(ranks).shares


def binding(ranks: int) -> Binding:
    """Decide how this host's `ranks` ranks are bound."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    host = Host(
        nodes=nodes_of(allowed, SYSTEM),
        hybrid=(SYSTEM.parent / "cpu_atom").exists(),
        gpus=any(map(os.path.exists, GPU_FILES)),
        quota=quota(),
        cores_elsewhere=(os.cpu_count() or 1) - len(allowed),
        programs=running,
    )
    reason = host.obstacle(ranks, os.environ)
    if reason:
        return Binding(nodes=host.nodes, reason=reason)
    divided = divide(host.nodes, ranks)
    return Binding(nodes=host.nodes, shares=[frozenset().union(*share) for share in divided])


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What decides whether ranks are bound here."""

    nodes: Sequence[Node]
    hybrid: bool = False
    """Whether some cores are slower by design."""
    gpus: bool = False
    quota: float
    """How many cores' time this process's control group has."""
    cores_elsewhere: int
    """The host's cores that this process may not use, but other programs may."""
    programs: Callable[[], int]
    """Returns how many other programs run now."""

    def obstacle(self, ranks: int, variables: Mapping[str, str]) -> str:
        """Return why `ranks` ranks are not bound; "" if they are to be."""
        physical = sum(map(len, self.nodes))
        allowed = sum(len(core) for node in self.nodes for core in node)
        if not physical:
            return "this system does not say which cores it has"
        if ranks == 1:
            return "one rank uses all cores"
        if physical < ranks:
            return f"{ranks} ranks are more than the physical cores"
        if physical == ranks and len(self.nodes) == 1:
            return "each rank has one core, and all cores are on one node"
        if self.hybrid:
            return "some cores are slower than others"
        if self.gpus:
            return "Lockstep does not know which cores are near which GPU"
        if self.quota < allowed:
            return f"a control group allows the time of {self.quota:g} of {allowed} cores"
        for name in _SET_BY_USER:
            if name in variables:
                return f"{name} is set"
        if self.programs() > self.cores_elsewhere + allowed // _SPARE:
            return "other programs keep cores busy"
        return ""


def nodes_of(allowed: Collection[int], system: Path) -> list[list[Core]]:
    """Return the physical cores among the `allowed` ones, by socket and NUMA node. A core that the
    system does not describe, because it is offline, is left out.

    Args:
        allowed: numbers of logical cores.
        system: /sys/devices/system, or a folder like it.
    """
    node_of = {}
    for folder in system.glob("node/node[0-9]*"):
        for number in _numbers(folder / "cpulist"):
            node_of[number] = int(folder.name.removeprefix("node"))
    nodes: dict[tuple[int, int], list[Core]] = {}
    for number in sorted(allowed):
        topology = system / "cpu" / f"cpu{number}" / "topology"
        siblings = _numbers(topology / "thread_siblings_list")
        for socket in _numbers(topology / "physical_package_id"):
            cores_of_node = nodes.setdefault((socket, node_of.get(number, 0)), [])
            core = siblings.intersection(allowed).union({number})
            if core not in cores_of_node:
                cores_of_node.append(core)
    return [nodes[key] for key in sorted(nodes)]


def _numbers(file: Path) -> frozenset[int]:
    """Return the numbers in a file such as "0-3,8". No file: none."""
    numbers: set[int] = set()
    with suppress(OSError, ValueError):
        for part in file.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def divide(nodes: Sequence[Node], ranks: int) -> list[Node]:
    """Divide physical cores among ranks, so that each rank lies in one node. If some rank then had
    fewer cores than an equal division gives it, divide equally: a step waits for its slowest rank.

    Example: 2 nodes of 4 cores for 3 ranks are 2 + 2 and 4 cores. 2 nodes of 6 cores are three
    times 4, and the second rank lies in both nodes.
    """
    every = [core for node in nodes for core in node]
    result: list[Node] = []
    passed = 0
    for node in nodes:
        passed += len(node)
        stop = (2 * ranks * passed + len(every)) // (2 * len(every))  # rounded
        result += _equal_parts(node, stop - len(result))
    if min(map(len, result)) < len(every) // ranks:
        return _equal_parts(every, ranks)
    return result


def _equal_parts(items: Node, count: int) -> list[Node]:
    bounds = [len(items) * part // max(1, count) for part in range(count + 1)]
    return [items[bounds[part] : bounds[part + 1]] for part in range(count)]


# -- in the rank's process -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bound:
    pid: int
    host_cores: int
    """`cores()` before."""


_bound: _Bound | None = None


def bind(share: Collection[int]) -> None:
    """Bind this rank's process to its share of the host's cores, before it starts threads."""
    global _bound
    before = cores()
    with suppress(OSError):  # the cores were taken away meanwhile
        os.sched_setaffinity(0, share)
        _bound = _Bound(os.getpid(), before)
        torch = sys.modules.get("torch")
        if torch is not None and "OMP_NUM_THREADS" not in os.environ:
            # in a fresh interpreter, torch would count the share's cores itself
            torch.set_num_threads(len(share))


def bound_here() -> _Bound | None:
    """Return how this process was bound. None also in a process that a bound rank has forked."""
    return _bound if _bound is not None and _bound.pid == os.getpid() else None


def host_cores() -> int:
    """Return the number of cores that all ranks of this host can keep busy together."""
    bound = bound_here()
    return cores() if bound is None else bound.host_cores


def rank_cores(local_size: int) -> int:
    """Return the number of cores that this rank can keep busy: those that it is bound to, else an
    equal part of the host's. At least 1.

    Args:
        local_size: the number of ranks of this host.
    """
    return cores() if bound_here() else max(1, cores() // local_size)
