"""Memory that the processes of one host map together. It has no name, so it never outlives the
processes, however they end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lockstep.collectives.store_barrier import wait_for_count
from lockstep.errors import UsageError


def this_host() -> str:
    """Return a text that is equal for processes that can map each other's memory: those of one
    kernel and one PID namespace. Linux only.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def share(
    store: dist.Store,
    key: str,
    rank: int,
    size: int,
    length: int,
    timeout: timedelta,
    kinds: Sequence[int] = (mmap.MAP_SHARED,),
) -> list[mmap.mmap]:
    """Map `length` bytes of zeros that all ranks see, once for each of `kinds`. Every rank calls
    it. Linux only.

    A page takes memory only when it is touched, on the NUMA node of the rank that touches it first.
    Nothing is touched here: every rank writes its own part before the others read it. The limit of
    /dev/shm does not apply. Raises UsageError on a rank that is not on rank 0's host.
    """
    if rank:
        host, path = store.get(f"{key}/path").decode().rsplit(" ", 1)
        if host != this_host():
            raise UsageError("host-of-another-rank", rank=rank)
        with open(path, "r+b") as file:
            maps = [mmap.mmap(file.fileno(), length, flags=kind) for kind in kinds]
        store.add(f"{key}/mapped", 1)
        return maps
    handle = os.memfd_create("lockstep", os.MFD_CLOEXEC)
    try:
        os.ftruncate(handle, length)
        maps = [mmap.mmap(handle, length, flags=kind) for kind in kinds]
        store.set(f"{key}/path", f"{this_host()} /proc/{os.getpid()}/fd/{handle}")
        wait_for_count(store, f"{key}/mapped", size - 1, timeout)
    finally:
        os.close(handle)
    return maps
