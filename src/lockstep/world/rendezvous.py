"""How a rank joins its world: over which backend, through which store, on which interface, with how
many threads.

Everything here happens once, before there is a World; `lockstep.init()` puts it together.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from lockstep.collectives import store_barrier as meeting
from lockstep.config.knob import chosen
from lockstep.errors import LockstepError, LockstepWarning, UsageError
from lockstep.launcher.watch import TIMEOUT
from lockstep.runtime import siblings
from lockstep.runtime.cores import cores
from lockstep.runtime.environment import Placement
from lockstep.runtime.host_store import HostStore
from lockstep.runtime.job_step import step_of
from lockstep.runtime.local_peers import no_strangers
from lockstep.world import slurm_store

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set where a launcher has the store, and rank 0 is a client of it as the others are."""
_BACKENDS = ("gloo", "nccl", "mpi")
_PAUSE_SECONDS = 0.25  # between two attempts to connect


def choose_backend(asked: str | None, place: Placement) -> str:
    """The backend that was asked for, or the one that fits the hardware. Raises UsageError for
    one that cannot work here.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = asked or ("nccl" if gpus else "gloo")
    chosen("backend", backend, _BACKENDS)
    if backend == "mpi" and not dist.is_mpi_available():
        raise UsageError("torch-without-mpi")
    if backend == "nccl" and not gpus:
        raise UsageError("no-gpu-visible")
    if backend == "nccl" and place.local_rank >= gpus:
        raise UsageError("more-ranks-than-gpus", local_rank=place.local_rank, gpus=gpus)
    return backend


def find_store(
    place: Placement, init_method: str | None, timeout: timedelta | None, at_end: ExitStack
) -> dist.Store:
    """The key-value store that the ranks find each other through. What has to end after the last
    use of it is given to `at_end`.
    """
    if init_method is None and place.size == 1:
        return dist.HashStore()
    step = step_of(place, os.environ) if init_method is None else None
    if init_method is not None or (step is None and "MASTER_ADDR" in os.environ):
        where = init_method or "env://"
        kwargs = {} if timeout is None else {"timeout": timeout}
        if (
            init_method is None
            and place.local_size != place.size
            and (place.rank > 0 or AGENT_STORE in os.environ)
        ):
            _wait_for_node_0(place, timeout or dist.default_pg_timeout)
        with _environment(RANK=str(place.rank), WORLD_SIZE=str(place.size)):
            store: dist.Store = next(
                iter(dist.rendezvous(where, place.rank, place.size, **kwargs))
            )[0]
        return store
    if step is not None and place.local_size != place.size:
        return slurm_store.across_hosts(step, timeout or timedelta(minutes=5))
    if place.local_size != place.size:
        raise UsageError("rank-0-host-unknown", source=place.source, size=place.size)
    key = siblings.key(os.environ) if step is None else f"slurm-{step.name}"
    return _store_among_siblings(place, key, timeout or timedelta(minutes=5), at_end)


def _wait_for_node_0(place: Placement, timeout: timedelta) -> None:
    """Until somebody listens where the ranks meet. torch's own client prints a stack of C++
    frames for each of its tries.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection(
                (address, int(port)), timeout=max(0.1, deadline - time.monotonic())
            ).close()
            return
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline or isinstance(error, ValueError):
                raise LockstepError(
                    "node-0-unreachable",
                    node=place.node,
                    address=f"{address}:{port}",
                    why=f"{getattr(error, 'strerror', None) or error}",
                    seconds=timeout.total_seconds(),
                ) from None
        time.sleep(_PAUSE_SECONDS)


def _store_among_siblings(
    place: Placement, key: str, timeout: timedelta, at_end: ExitStack
) -> dist.Store:
    if place.rank > 0:
        store = dist.TCPStore(
            "127.0.0.1", siblings.find(key, timeout), place.size, is_master=False, timeout=timeout
        )
        store.add("found", 1)
        return store
    host = HostStore(place.size, timeout)
    at_end.callback(host.close)
    siblings.publish(key, host.port)
    try:
        meeting.wait_for_count(host.store, "found", place.size - 1, timeout)
    finally:
        siblings.withdraw(key)
    return host.store


def timeout_of_launcher() -> timedelta | None:
    """What --timeout has said that one collective may take."""
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
    """Have forked children, such as loader workers, leave what this process has for collection
    alone, from their first instruction on.

    A process group among it, of an earlier world, would be torn down where its threads do not
    exist: the child hangs or crashes.
    """
    forking = threading.local()

    def before() -> None:
        forking.collecting = gc.isenabled()
        # what other modules run in the child before they let us may set a collection off
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
    """On one host have gloo listen on loopback: no host name is looked up and nothing is open to
    the network, or to other users of the host.
    """
    closed = one_host and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ
    with _environment(**{"GLOO_SOCKET_IFNAME": "lo"} if closed else {}), no_strangers("gloo"):
        yield


class SharedCores:
    """Intra-op threads: the cores of this host shared among its ranks, until closed."""

    def __init__(self, local_size: int) -> None:
        self._before = torch.get_num_threads()
        if not _threads_set_by_user():
            torch.set_num_threads(max(1, cores() // local_size))

    def close(self) -> None:
        torch.set_num_threads(self._before)


def _threads_set_by_user() -> bool:
    value = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets it to 1 where the user did not, which wastes cores on CPUs.
    return value is not None and not (value == "1" and "TORCHELASTIC_RUN_ID" in os.environ)
