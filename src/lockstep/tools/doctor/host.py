"""Examine what this host gives to its ranks: Python and torch; cores, memory, shared memory,
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

from lockstep.runtime.cores import allowed_cores, quota
from lockstep.tools.finding import Finding, judged

MIB, GIB = 2**20, 2**30
_OPEN_FILES, _PROCESSES = 4096, 4096
_NO_LIMIT = 2**62


def findings(workers: int) -> list[Finding]:
    """Examine this host's resources for `workers` ranks."""
    group = cgroup(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    shm = psutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    system = psutil.virtual_memory()
    return [
        cores(allowed_cores(), quota(), workers, os.environ.get("OMP_NUM_THREADS")),
        memory(system.available, system.total, group, workers),
        *([shared_memory(shm.total, shm.free)] if shm is not None else []),
        limits(current_limits(), infiniband=Path("/dev/infiniband").exists()),
    ]


def cgroup(of_process: Path, root: Path) -> Path:
    """Return the directory of this process's control group (version 2), or `root` if the file names
    none.
    """
    try:
        named = next(line for line in of_process.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return root
    inside = root / named.removeprefix("0::").lstrip("/")
    return inside if inside.is_dir() else root


def cores(available: int, allowed: float, workers: int, threads: str | None) -> Finding:
    """Judge the cores. `available` are the cores that this process may run on, `allowed` is the
    quota of the control group, `threads` is OMP_NUM_THREADS.
    """
    usable = min(available, max(1.0, allowed))
    each = int(threads) if threads and threads.isdigit() else max(1, int(usable) // workers)
    value = f"{available}" + (
        f", of which a cgroup allows {allowed:g}" if allowed < available else ""
    )
    value += f"; {workers} rank{'s' * (workers != 1)} x {each} thread{'s' * (each != 1)}"
    should = max(1, int(usable) // workers)
    warn = ""
    if workers > usable:
        warn = f"{workers} ranks share {usable:g} cores: start at most {int(usable)}"
    elif threads and workers * each > usable:
        warn = (
            f"OMP_NUM_THREADS={threads} and {workers} ranks want {workers * each} cores of"
            f" {usable:g}: set OMP_NUM_THREADS={should}, or unset it"
        )
    elif threads == "1" and should > 1:
        warn = (
            f"OMP_NUM_THREADS=1 leaves {int(usable) - workers} of {usable:g} cores idle: set"
            f" OMP_NUM_THREADS={should}, or unset it"
        )
    return judged("cores", value, warn=warn)


def memory(free: int, total: int, group: Path, workers: int) -> Finding:
    """Judge the free memory, as the system and the control group report it. Warn if a process was
    killed because memory ran out.
    """
    value = f"{_size(free)} free of {_size(total)}"
    limit = _read(group / "memory.max").strip()
    if limit.isdigit():
        free = min(free, int(limit) - int(_read(group / "memory.current").strip() or 0))
        value += f"; the cgroup allows {_size(int(limit))}, of which {_size(max(0, free))} are left"
    events = dict(
        line.split()
        for line in _read(group / "memory.events").splitlines()
        if len(line.split()) == 2
    )
    killed = int(events.get("oom_kill", 0))
    per_rank = free / workers
    if per_rank < 300 * MIB:
        why = (
            f"{_size(max(0, per_rank))} for each of {workers} ranks is less than the 300 MiB that"
            " torch alone takes: free memory, or start fewer ranks"
        )
        return judged("memory", value, fix=why)
    warnings = []
    if killed:
        warnings.append(
            f"memory ran out here {killed} times before, and processes were killed: raise the"
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
    remedy = "in a container, start it with --shm-size=8g or --ipc=host"
    there = f"{_size(free)} in /dev/shm"
    if free < 32 * MIB:
        why = (
            f"{there} is too little for a loader worker's batches (bus error): remove files there;"
            f" {remedy}"
        )
        return judged("/dev/shm", value, fix=why)
    why = f"{there} may be too little for loader workers (bus error): {remedy}"
    return judged("/dev/shm", value, warn=why if free < 512 * MIB else "")


def current_limits() -> dict[str, int]:
    """Return the soft limits of this process by name; no limit is a very large number."""
    kinds = {
        "open files": psutil.RLIMIT_NOFILE,
        "locked memory": psutil.RLIMIT_MEMLOCK,
        "processes": psutil.RLIMIT_NPROC,
    }
    soft = {name: psutil.Process().rlimit(kind)[0] for name, kind in kinds.items()}
    return {
        name: _NO_LIMIT if limit == psutil.RLIM_INFINITY else limit for name, limit in soft.items()
    }


def limits(soft: Mapping[str, int], *, infiniband: bool) -> Finding:
    """Judge `ulimit`'s values, in files, bytes and processes."""
    shown = {
        name: (
            "unlimited"
            if value >= _NO_LIMIT
            else _size(value)
            if name == "locked memory"
            else str(value)
        )
        for name, value in soft.items()
    }
    value = ", ".join(f"{name} {text}" for name, text in shown.items())
    if infiniband and soft["locked memory"] < GIB:
        why = (
            f"InfiniBand pins memory, but {shown['locked memory']} of locked memory are not"
            " enough: `ulimit -l unlimited` (LimitMEMLOCK=infinity)"
        )
        return judged("limits", value, fix=why)
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


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _size(octets: float) -> str:
    return f"{octets / GIB:.1f} GiB" if octets >= GIB else f"{octets / MIB:.0f} MiB"


Resolve = Callable[[str], Sequence[str]]


def addresses_of(name: str) -> list[str]:
    """Return the IPv4 addresses of a name; none if it cannot be resolved."""
    try:
        return list(
            dict.fromkeys(
                str(found[4][0])
                for found in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            )
        )
    except OSError:
        return []


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    every = psutil.net_if_addrs().items()
    return {
        name: each.address
        for name, found in every
        for each in found
        if each.family == socket.AF_INET
    }


def own_name(name: str, resolve: Resolve) -> Finding:
    """Judge what this host's own name resolves to. torchrun tells other hosts to connect to it."""
    found = resolve(name)
    value = f"{name} is {', '.join(found) if found else 'unknown'}"
    why = (
        f"this host's name {name!r} does not resolve: add it to /etc/hosts (Lockstep does not need"
        " it on one host; torchrun does)"
    )
    return judged("own name", value, warn="" if found else why)


def used(every: Mapping[str, str], address: str, asked: str | None) -> Finding:
    """Judge the interface that ranks will use: that of `address`, or the one that
    GLOO_SOCKET_IFNAME (`asked`) names.
    """
    listed = ", ".join(f"{name} {each}" for name, each in every.items()) or "unknown"
    mine = next(
        (
            name
            for name, each in every.items()
            if each == address or (name == "lo" and address.startswith("127."))
        ),
        None,
    )
    if asked and every and asked not in every:
        return judged(
            "interfaces",
            listed,
            fix=(
                f"GLOO_SOCKET_IFNAME={asked} names no interface with an address here ({listed}):"
                " unset it, or name one of them"
            ),
        )
    if asked and mine and asked != mine:
        warn = (
            f"GLOO_SOCKET_IFNAME={asked}, but {mine} reaches the peers: unset it, unless you want"
            " that"
        )
        return judged("interfaces", f"{listed}; used: {asked}", warn=warn)
    return judged("interfaces", f"{listed}; used: {mine or address}")


def loopback_port() -> Finding:
    """Check whether processes of this host can connect to each other."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=3),
        ):
            return judged("loopback", f"127.0.0.1:{server.getsockname()[1]} can be reached")
    except OSError as error:
        why = (
            f"processes of this host cannot connect to 127.0.0.1 ({error.strerror or error}):"
            " bring lo up (`ip link set lo up`), and check the firewall"
        )
        return judged("loopback", "127.0.0.1 cannot be reached", fix=why)


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
    gpus = (
        [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and "nccl" in backends else ""
    driver = _DRIVER.read_text() if _DRIVER.exists() else ""
    return [
        version("Python", platform.python_version(), python),
        version("torch", torch.__version__, torch_range),
        system(sys.platform, platform.machine()),
        judged(
            "backends",
            ", ".join(backends),
            fix=(
                ""
                if "gloo" in backends
                else "this torch was built without gloo: install a wheel of it"
            ),
        ),
        graphics(gpus, torch.version.cuda, driver, nccl),
    ]


def required() -> tuple[str, str]:
    """Return the versions of Python and torch that the installed package requires; "" if the
    package is only on the path.
    """
    try:
        about = metadata.metadata("lockstep-train")
    except metadata.PackageNotFoundError:
        return "", ""
    needs = [
        text.removeprefix("torch")
        for text in about.get_all("Requires-Dist", ())
        if re.match(r"torch[<>=]", text)
    ]
    return next(iter(about.get_all("Requires-Python", ())), ""), needs[0] if needs else ""


def version(name: str, found: str, wanted: str) -> Finding:
    """Judge a version. `wanted` is a range such as `>=2.11,<2.14`."""
    outside = [part for part in wanted.split(",") if part and not _satisfies(found, part.strip())]
    why = (
        f"{name} {found} is outside {wanted}, with which this version of Lockstep is tested:"
        " install a version in that range"
    )
    supported = f" (supported: {wanted})" if wanted else ""
    return judged(name, found + supported, fix=why if outside else "")


def system(name: str, machine: str) -> Finding:
    """Judge the operating system and the processor's architecture."""
    warn = (
        ""
        if name == "linux"
        else f"{name} is not tested: ranks use the backend's own transport there, not shared memory"
    )
    if name == "linux" and machine not in ("x86_64", "AMD64"):
        warn = (
            f"on {machine} ranks do not use shared memory, which Lockstep supports on x86 only:"
            " the backend sums"
        )
    return judged("system", f"{name} {machine}", warn=warn)


def graphics(gpus: Sequence[str], built_for: str | None, driver: str, nccl: str) -> Finding:
    """Judge the GPUs. `driver` is the version text of the kernel's module; "" without a driver."""
    number = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", driver)
    named = f"driver {number[1]}" if number else "no driver"
    if gpus:
        kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
        return judged(
            "GPUs", f"{kinds}; {named}, CUDA {built_for}" + (f", NCCL {nccl}" if nccl else "")
        )
    if driver and built_for is None:
        return judged(
            "GPUs",
            f"none that torch sees; {named}",
            warn="a GPU driver is loaded, but this torch is built for CPUs: install a CUDA wheel",
        )
    if driver:
        why = (
            f"a GPU driver is loaded, but torch (CUDA {built_for}) sees no GPU: check"
            " CUDA_VISIBLE_DEVICES, the container's GPU option and the driver's version"
        )
        return judged("GPUs", f"none that torch sees; {named}", fix=why)
    return judged("GPUs", "none")


def _satisfies(found: str, part: str) -> bool:
    match = re.match(r"(>=|<=|==|<|>)\s*([\d.]+)", part)
    return match is None or bool(_COMPARE[match[1]](_numbers(found), _numbers(match[2])))


def _numbers(text: str) -> tuple[int, ...]:
    digits = re.match(r"[\d.]*", text.partition("+")[0])[0]  # type: ignore[index]  # matches all
    return tuple(int(number) for number in digits.strip(".").split("."))[:2]
