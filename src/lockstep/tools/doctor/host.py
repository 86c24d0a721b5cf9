"""Examine what this host gives to its ranks: Python and torch; cores, binding, memory, shared memory,
limits; names, addresses, interfaces and ports. Paths are arguments, so that tests can pass files.
"""

from __future__ import annotations

import operator
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from lockstep.runtime import binding
from lockstep.runtime.cores import allowed_cores, quota
from lockstep.tools.finding import Finding, judged
from lockstep.tools.timing.output_files import counted

MIB, GIB = 2**20, 2**30
_OPEN_FILES, _PROCESSES = 4096, 4096
_NO_LIMIT = 2**62


def findings(workers: int) -> list[Finding]:
    """Examine this host's resources for `workers` ranks."""
    group = cgroup(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    system = psutil.virtual_memory()
    checks = [
        cores(allowed_cores(), quota(), workers, os.environ.get("OMP_NUM_THREADS")),
        bound(binding.binding(workers)),
        memory(system.available, system.total, group, workers),
    ]
    if os.path.isdir("/dev/shm"):
        shm = psutil.disk_usage("/dev/shm")
        checks.append(shared_memory(shm.total, shm.free))
    checks.append(limits(current_limits(), infiniband=Path("/dev/infiniband").exists()))
    return checks


def cgroup(of_process: Path, root: Path) -> Path:
    """Return the directory of this process's control group (version 2), or `root` if the file names
    none.
    """
    for line in _read(of_process).splitlines():
        if line.startswith("0::"):
            inside = root / line.removeprefix("0::").lstrip("/")
            return inside if inside.is_dir() else root
    return root


def cores(available: int, allowed: float, workers: int, threads: str | None) -> Finding:
    """Judge the cores. `available` are the cores that this process may run on, `allowed` is the
    quota of the control group, `threads` is OMP_NUM_THREADS.
    """
    usable = min(available, max(1.0, allowed))
    should = max(1, int(usable) // workers)
    per_rank = int(threads) if threads and threads.isdigit() else should
    value = f"{available}"
    if allowed < available:
        value += f", of which a cgroup allows {allowed:g}"
    value += f"; {counted(workers, 'rank')} x {counted(per_rank, 'thread')}"
    warn = ""
    if workers > usable:
        warn = f"{workers} ranks share {usable:g} cores: start at most {int(usable)}"
    elif threads and workers * per_rank > usable:
        warn = (
            f"OMP_NUM_THREADS={threads} and {workers} ranks want {workers * per_rank} cores of"
            f" {usable:g}: set OMP_NUM_THREADS={should}, or unset it"
        )
    elif threads == "1" and should > 1:
        warn = (
            f"OMP_NUM_THREADS=1 leaves {int(usable) - workers} of {usable:g} cores idle: set"
            f" OMP_NUM_THREADS={should}, or unset it"
        )
    return judged("cores", value, warn=warn)


def bound(decided: binding.Binding) -> Finding:
    """Say which cores each rank is bound to, or why none is bound."""
    physical = sum(map(len, decided.nodes))
    value = f"{counted(len(decided.nodes), 'node')}, {counted(physical, 'physical core')}; "
    if decided.reason:
        return judged("binding", f"{value}ranks are not bound: {decided.reason}")
    shares = [f"rank {rank}: {decided.cores_of(rank)}" for rank in range(len(decided.shares))]
    return judged("binding", f"{value}cores of {', of '.join(shares)}")


def memory(free: int, total: int, group: Path, workers: int) -> Finding:
    """Judge the free memory, as the system and the control group report it. Warn if a process was
    killed because memory ran out.
    """
    value = f"{_size(free)} free of {_size(total)}"
    limit = _read(group / "memory.max").strip()
    if limit.isdigit():
        free = min(free, int(limit) - int(_read(group / "memory.current").strip() or 0))
        value += f"; the cgroup allows {_size(int(limit))}, of which {_size(max(0, free))} are left"
    killed = re.search(r"^oom_kill ([1-9]\d*)$", _read(group / "memory.events"), re.MULTILINE)
    per_rank = free / workers
    if per_rank < 300 * MIB:
        fix = (
            f"{_size(max(0, per_rank))} for each of {workers} ranks is less than the 300 MiB that"
            " torch alone takes: free memory, or start fewer ranks"
        )
        return judged("memory", value, fix=fix)
    warnings = []
    if killed:
        warnings.append(
            f"memory ran out here {killed[1]} times before, and processes were killed: raise the"
            " limit, or start fewer ranks"
        )
    if per_rank < GIB:
        warnings.append(
            f"{_size(per_rank)} for each of {workers} ranks is little: the model, its gradients"
            " and the optimizer's state must fit into it"
        )
    return judged("memory", value, warn="; ".join(warnings))


def shared_memory(size: int, free: int) -> Finding:
    """Judge /dev/shm, where DataLoader's workers put their batches. Lockstep's shared-memory
    reduction does not need it.
    """
    value = f"{_size(free)} free of {_size(size)}"
    problem = (
        f"{_size(free)} in /dev/shm may be too little for the batches of loader workers (bus"
        " error): remove files there; in a container, start it with --shm-size=8g or --ipc=host"
    )
    if free < 32 * MIB:
        return judged("/dev/shm", value, fix=problem)
    return judged("/dev/shm", value, warn=problem if free < 512 * MIB else "")


def current_limits() -> dict[str, int]:
    """Return the soft limits of this process by name; no limit is a very large number."""
    kinds = {
        "open files": psutil.RLIMIT_NOFILE,
        "locked memory": psutil.RLIMIT_MEMLOCK,
        "processes": psutil.RLIMIT_NPROC,
    }
    limits = {}
    for name, kind in kinds.items():
        soft, _ = psutil.Process().rlimit(kind)
        limits[name] = _NO_LIMIT if soft == psutil.RLIM_INFINITY else soft
    return limits


def limits(soft: Mapping[str, int], *, infiniband: bool) -> Finding:
    """Judge `ulimit`'s values, in files, bytes and processes."""
    value = ", ".join(f"{name} {_limit(name, limit)}" for name, limit in soft.items())
    if infiniband and soft["locked memory"] < GIB:
        fix = (
            f"InfiniBand pins memory, but {_size(soft['locked memory'])} of locked memory are not"
            " enough: `ulimit -l unlimited` (LimitMEMLOCK=infinity)"
        )
        return judged("limits", value, fix=fix)
    tight = []
    if soft["open files"] < _OPEN_FILES:
        tight.append(
            f"{soft['open files']} open files may not be enough for loader workers and"
            " connections: `ulimit -n 65536`"
        )
    if soft["processes"] < _PROCESSES:
        tight.append(
            f"{soft['processes']} processes and threads of this user may not be enough: `ulimit -u"
            " 65536`"
        )
    return judged("limits", value, warn="; ".join(tight))


def _limit(name: str, limit: int) -> str:
    if limit >= _NO_LIMIT:
        return "unlimited"
    return _size(limit) if name == "locked memory" else str(limit)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


Resolve = Callable[[str], Sequence[str]]


def addresses_of(name: str) -> list[str]:
    """Return the IPv4 addresses of a name; none if it cannot be resolved."""
    try:
        return socket.gethostbyname_ex(name)[2]
    except OSError:
        return []


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    ips = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                ips[name] = address.address
    return ips


def own_name(name: str, resolve: Resolve) -> Finding:
    """Judge what this host's own name resolves to. torchrun tells other hosts to connect to it."""
    addresses = resolve(name)
    if addresses:
        return judged("own name", f"{name} is {', '.join(addresses)}")
    warn = (
        f"this host's name {name!r} does not resolve: add it to /etc/hosts (Lockstep does not need"
        " it on one host; torchrun does)"
    )
    return judged("own name", f"{name} is unknown", warn=warn)


def used(every: Mapping[str, str], address: str, requested: str | None) -> Finding:
    """Judge the interface that ranks will use: that of `address`, or the one that
    GLOO_SOCKET_IFNAME (`requested`) names. `every`: the addresses of all interfaces.
    """
    listed = ", ".join(f"{name} {ip}" for name, ip in every.items()) or "unknown"
    reached = {name for name, ip in every.items() if ip == address}
    if address.startswith("127."):
        reached.add("lo")
    interface = next((name for name in every if name in reached), None)
    if requested and every and requested not in every:
        fix = (
            f"GLOO_SOCKET_IFNAME={requested} names no interface with an address here ({listed}):"
            " unset it, or name one of them"
        )
        return judged("interfaces", listed, fix=fix)
    if requested and interface and requested != interface:
        warn = (
            f"GLOO_SOCKET_IFNAME={requested}, but {interface} reaches the peers: unset it, unless"
            " you want that"
        )
        return judged("interfaces", f"{listed}; used: {requested}", warn=warn)
    return judged("interfaces", f"{listed}; used: {interface or address}")


def loopback_port() -> Finding:
    """Check whether processes of this host can connect to each other."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=3),
        ):
            return judged("loopback", f"127.0.0.1:{server.getsockname()[1]} can be reached")
    except OSError as error:
        fix = (
            f"processes of this host cannot connect to 127.0.0.1 ({error.strerror or error}):"
            " bring lo up (`ip link set lo up`), and check the firewall"
        )
        return judged("loopback", "127.0.0.1 cannot be reached", fix=fix)


_DRIVER = Path("/proc/driver/nvidia/version")
_COMPARE = {
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    "==": operator.eq,
}


def installation() -> list[Finding]:
    """Examine the installed Python and torch, the system, the backends and the GPUs."""
    import torch
    import torch.distributed as dist

    python, torch_range = required()
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    gpus = []
    nccl = ""
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        if gpus and "nccl" in backends:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    no_gloo = "this torch was built without gloo: install a wheel of it"
    return [
        version("Python", platform.python_version(), python),
        version("torch", torch.__version__, torch_range),
        system(sys.platform, platform.machine()),
        judged("backends", ", ".join(backends), fix="" if "gloo" in backends else no_gloo),
        graphics(gpus, torch.version.cuda, _read(_DRIVER), nccl),
    ]


def required() -> tuple[str, str]:
    """Return the versions of Python and torch that the installed package requires; "" if the
    package is only on the path.
    """
    try:
        about = metadata.metadata("lockstep-train")
    except metadata.PackageNotFoundError:
        return "", ""
    torch_range = ""
    for requirement in about.get_all("Requires-Dist", ()):
        if re.match(r"torch[<>=]", requirement):
            torch_range = requirement.removeprefix("torch")
            break
    return next(iter(about.get_all("Requires-Python", ())), ""), torch_range


def version(name: str, installed: str, wanted: str) -> Finding:
    """Judge a version. `wanted` is a range such as `>=2.11,<2.14`."""
    if not wanted:
        return judged(name, installed)
    value = f"{installed} (supported: {wanted})"
    fix = ""
    for sign, bound in re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", wanted):
        if not _COMPARE[sign](_numbers(installed), _numbers(bound)):
            fix = (
                f"{name} {installed} is outside {wanted}, with which this version of Lockstep is"
                " tested: install a version in that range"
            )
    return judged(name, value, fix=fix)


def system(name: str, machine: str) -> Finding:
    """Judge the operating system and the processor's architecture."""
    warn = ""
    if name != "linux":
        warn = (
            f"{name} is not tested: ranks use the backend's own transport there, not shared memory"
        )
    elif machine not in ("x86_64", "AMD64"):
        warn = (
            f"on {machine} ranks do not use shared memory, which Lockstep supports on x86 only:"
            " the backend sums"
        )
    return judged("system", f"{name} {machine}", warn=warn)


def graphics(gpus: Sequence[str], built_for: str | None, driver: str, nccl: str) -> Finding:
    """Judge the GPUs. `driver` is the version text of the kernel's module; "" without a driver."""
    number = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", driver)
    driver_version = f"driver {number[1]}" if number else "no driver"
    if gpus:
        kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
        value = f"{kinds}; {driver_version}, CUDA {built_for}"
        return judged("GPUs", f"{value}, NCCL {nccl}" if nccl else value)
    if not driver:
        return judged("GPUs", "none")
    value = f"none that torch sees; {driver_version}"
    if built_for is None:
        warn = "a GPU driver is loaded, but this torch is built for CPUs: install a CUDA wheel"
        return judged("GPUs", value, warn=warn)
    fix = (
        f"a GPU driver is loaded, but torch (CUDA {built_for}) sees no GPU: check"
        " CUDA_VISIBLE_DEVICES, the container's GPU option and the driver's version"
    )
    return judged("GPUs", value, fix=fix)


def _numbers(version: str) -> list[int]:
    """The major and the minor number."""
    return list(map(int, re.findall(r"\d+", version)[:2]))
