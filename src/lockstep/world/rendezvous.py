"""How a rank joins its world: backend, store, network interface and threads.

All of this happens once, before there is a World; `lockstep.init()` calls it.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import ipaddress
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.collectives import store_barrier
from lockstep.config.knob import chosen
from lockstep.errors import LockstepError, LockstepWarning, UsageError
from lockstep.runtime.binding import rank_cores
from lockstep.runtime.environment import TIMEOUT, Placement, step_of
from lockstep.runtime.interfaces import address_of
from lockstep.runtime.launched import launcher
from lockstep.runtime.private import new_file, owner_lives, start_time, user_directory
from lockstep.runtime.slurm_step import Step, endpoint
from lockstep.runtime.strangers import no_strangers

_BACKENDS = ("gloo", "nccl", "mpi")
_PAUSE_SECONDS = 0.25  # between two attempts to connect


def choose_backend(backend: str | None, placement: Placement) -> str:
    """Return the backend that was asked for, or the one that fits the hardware. Raises UsageError
    for one that cannot work here.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not backend:
        backend = "nccl" if gpus else "gloo"
    chosen("backend", backend, _BACKENDS)
    if backend == "mpi" and not dist.is_mpi_available():
        raise UsageError("torch-without-mpi")
    if backend == "nccl" and not gpus:
        raise UsageError("no-gpu-visible")
    if backend == "nccl" and placement.local_rank >= gpus:
        raise UsageError("more-ranks-than-gpus", local_rank=placement.local_rank, gpus=gpus)
    return backend


def find_store(
    placement: Placement, init_method: str | None, timeout: timedelta | None, at_end: ExitStack
) -> dist.Store:
    """Return the key-value store through which the ranks find each other. `at_end` receives what
    must be closed after the last use of the store.
    """
    if init_method is not None:
        return _store_of_torch(placement, init_method, timeout)
    if placement.size == 1:
        return dist.HashStore()
    step = step_of(placement, os.environ)
    on_one_host = placement.local_size == placement.size
    if step is None and "MASTER_ADDR" in os.environ:
        patience = timeout or dist.default_pg_timeout
        starter = launcher(os.environ)
        if starter is not None and on_one_host:
            return _file_store(starter.directory / "store", patience)
        if not on_one_host and (placement.rank > 0 or starter is not None):
            _wait_for_node_0(placement, patience)
        return _store_of_torch(placement, "env://", timeout)
    patience = timeout or timedelta(minutes=5)
    if on_one_host:
        key = siblings_key(os.environ) if step is None else f"slurm-{step.name}"
        return _store_among_siblings(placement, key, patience, at_end)
    if step is None:
        raise UsageError("rank-0-host-unknown", source=placement.source, size=placement.size)
    return across_hosts(step, patience)


def _store_of_torch(placement: Placement, url: str, timeout: timedelta | None) -> dist.Store:
    options = {} if timeout is None else {"timeout": timeout}
    rank, size = placement.rank, placement.size
    with _environment(RANK=str(rank), WORLD_SIZE=str(size)):
        store: dist.Store
        store, _, _ = next(iter(dist.rendezvous(url, rank, size, **options)))
    return store


def _file_store(file: Path, timeout: timedelta) -> dist.Store:
    """Return torch's FileStore. Whoever may open the file may take part."""
    store = dist.FileStore(str(file))
    store.set_timeout(timeout)
    return store


def _wait_for_node_0(placement: Placement, timeout: timedelta) -> None:
    """Return when something listens at the rendezvous address. torch's own client prints a stack of
    C++ frames for each of its tries.
    """
    address = os.environ["MASTER_ADDR"]
    port = os.environ.get("MASTER_PORT", "")
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            socket.create_connection((address, int(port)), timeout=left).close()
            return
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline or isinstance(error, ValueError):
                reason = getattr(error, "strerror", None) or str(error)
                raise LockstepError(
                    "node-0-unreachable",
                    node=placement.node,
                    address=f"{address}:{port}",
                    why=reason,
                    seconds=seconds,
                ) from None
        time.sleep(_PAUSE_SECONDS)


def _store_among_siblings(
    placement: Placement, key: str, timeout: timedelta, at_end: ExitStack
) -> dist.Store:
    if placement.rank > 0:
        store = _file_store(find_store_file(key, timeout), timeout)
        store.add("found", 1)
        return store
    file = publish_store_file(key)

    def remove(error_type: object, *_: object) -> None:
        if error_type is None:  # after a failure other ranks may still read it
            file.unlink(missing_ok=True)

    at_end.push(remove)
    store = _file_store(file, timeout)
    try:
        store_barrier.wait_for_count(store, "found", placement.size - 1, timeout)
    finally:
        withdraw_store_file(key)
    return store


def timeout_of_launcher() -> timedelta | None:
    """Return the launcher's --timeout for one collective, if there is one. Warn about NCCL_TIMEOUT,
    which nothing reads.
    """
    if os.environ.get("NCCL_TIMEOUT"):
        text = (
            f"NCCL_TIMEOUT={os.environ['NCCL_TIMEOUT']} is set, but neither NCCL nor torch reads"
            " it; use --timeout, or init(timeout=...)"
        )
        warnings.warn(text, LockstepWarning, stacklevel=4)
    seconds = os.environ.get(TIMEOUT)
    return None if seconds is None else timedelta(seconds=float(seconds))


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables for the block and put the old values back."""
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def spare_forks() -> None:
    """Keep forked children, such as loader workers, from garbage-collecting what this process has.
    This holds from a child's first instruction on.

    Such garbage may include the process group of an earlier world. A child would destroy it without
    its threads, and would hang or crash.
    """
    forking = threading.local()

    def before() -> None:
        forking.collecting = gc.isenabled()
        # hooks of other modules run in the child before ours, and may start a collection
        gc.disable()

    def after() -> None:
        if forking.collecting:
            gc.enable()

    def after_in_child() -> None:
        gc.freeze()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


@contextmanager
def loopback(one_host: bool) -> Iterator[None]:
    """On one host, make gloo listen on loopback. Then no host name is looked up, and nothing is
    open to the network or to other users of the host.
    """
    variables = {}
    if one_host and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    with _environment(**variables), no_strangers("gloo"):
        yield


class SharedCores:
    """Sets the intra-op threads until closed: the cores that the rank is bound to, or this host's
    cores divided by its ranks. Unless the user has set OMP_NUM_THREADS.
    """

    def __init__(self, local_size: int) -> None:
        self._before = torch.get_num_threads()
        threads = os.environ.get("OMP_NUM_THREADS")
        # torchrun sets it to 1 where the user did not, which wastes cores on CPUs
        set_by_torchrun = threads == "1" and "TORCHELASTIC_RUN_ID" in os.environ
        if threads is None or set_by_torchrun:
            torch.set_num_threads(rank_cores(local_size))

    def close(self) -> None:
        torch.set_num_threads(self._before)


_JOB_NAMES = ("PMIX_NAMESPACE", "PMI_PORT", "OMPI_MCA_ess_base_jobid")
_SIBLINGS_PAUSE_SECONDS = 0.01


def siblings_key(env: Mapping[str, str]) -> str:
    """Return a name that is equal for all ranks of this job, and for no other job.

    MPI launchers name the job in `env` (their ranks may have different parents). Otherwise the name
    identifies this process's parent.
    """
    for name in _JOB_NAMES:
        if env.get(name):
            return hashlib.sha256(f"{name}={env[name]}".encode()).hexdigest()[:32]
    parent = os.getppid()
    return f"{parent}-{start_time(parent)}"


def publish_store_file(key: str) -> Path:
    """Create a file for a new store and publish its name for the other ranks; rank 0 calls this. It
    replaces what this process has published under this key, and removes the files of dead
    processes.
    """
    withdraw_store_file(key)
    home = user_directory()
    for old in home.glob("store-*"):
        if not owner_lives(old):
            old.unlink(missing_ok=True)
    file = new_file(home, "store")
    Path(f"{file}-{key}").touch()
    return file


def find_store_file(key: str, timeout: timedelta) -> Path:
    """Return the file that a living rank 0 has published; the other ranks call this. It waits up to
    `timeout`.

    Raises:
        LockstepError: nothing was published in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        for name in _published(key):
            if owner_lives(name):
                return Path(str(name).removesuffix(f"-{key}"))
        if time.monotonic() > deadline:
            raise LockstepError("rank-0-not-found", seconds=timeout.total_seconds())
        time.sleep(_SIBLINGS_PAUSE_SECONDS)


def withdraw_store_file(key: str) -> None:
    """Remove the published name, if it is this process's; rank 0 calls this. The file stays."""
    for name in _published(key, os.getpid()):
        name.unlink(missing_ok=True)


def _published(key: str, pid: int | str = "*") -> Iterator[Path]:
    return user_directory().glob(f"store-{pid}-*-*-{key}")


_KNOWN_WITHIN = timedelta(seconds=10)


@cache
def across_hosts(step: Step, timeout: timedelta) -> dist.Store:
    """Return the store of a SLURM step on several hosts. All worlds of this process share it.

    Raises LockstepError within ten seconds if another program listens on the step's port.
    """
    host, _ = endpoint(step)
    port = step.port
    if step.rank == 0:
        listener = _listen(host, port, step)
        store = dist.TCPStore(
            host,
            port,
            step.size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store.set(_mark(step), step.name)
    else:
        _look_up(host)
        store = dist.TCPStore(host, port, step.size, is_master=False, timeout=timeout)
        deadline = time.monotonic() + _KNOWN_WITHIN.total_seconds()
        while not store.check([_mark(step)]):
            if time.monotonic() > deadline:
                raise LockstepError(
                    "slurm-port-taken",
                    port=port,
                    host=host,
                    step=step.name,
                    why="belongs to another program",
                )
            time.sleep(0.02)
    return dist.PrefixStore(f"slurm/{step.name}", store)


def _mark(step: Step) -> str:
    return f"lockstep/runtime/slurm/{step.name}"


def _listen(host: str, port: int, step: Step) -> socket.socket:
    """Listen on the address that the other ranks use. If this host resolves its own name to
    loopback, as Debian hosts do, listen on all addresses.
    """
    address = _look_up(host)
    interface = "" if address.is_loopback and host != str(address) else str(address)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        return socket.create_server((interface, port), family=family)
    except OSError as error:
        reason = f"cannot be opened ({os.strerror(error.errno or 0)})"
        if error.errno == errno.EADDRINUSE:
            reason = "is in use"
        raise UsageError(
            "slurm-port-taken", port=port, host=host, step=step.name, why=reason
        ) from None


def _look_up(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(address_of(host))
    except OSError:
        raise UsageError("host-not-found", host=host, here=socket.gethostname()) from None
