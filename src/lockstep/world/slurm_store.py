"""How the tasks of a SLURM job step meet on several hosts: at rank 0's host, on a port that follows
from the step's number.

Nobody needs to be asked: every rank computes host and port from its own environment. The port may
be somebody else's, though. Rank 0 finds that out when it cannot listen; the others, because what
they have reached does not know the step.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from lockstep.errors import LockstepError, UsageError
from lockstep.runtime.job_step import address
from lockstep.runtime.slurm import Step

_KNOWN_WITHIN = timedelta(seconds=10)


@cache
def across_hosts(step: Step, timeout: timedelta) -> dist.Store:
    """The store of a step on several hosts, one for all worlds of this process.

    Raises a sentence within ten seconds of reaching something that is not of this step.
    """
    host, port = address(step)[0], step.port
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
    """On the address that the others will use; everywhere if this host takes its own name for
    loopback, as Debian's do.
    """
    found = _look_up(host)
    where = "" if found.is_loopback and not _is_address(host) else str(found)
    try:
        return socket.create_server(
            (where, port), family=socket.AF_INET6 if found.version == 6 else socket.AF_INET
        )
    except OSError as error:
        why = (
            "is in use"
            if error.errno == errno.EADDRINUSE
            else f"cannot be listened on ({os.strerror(error.errno or 0)})"
        )
        raise UsageError(
            "slurm-port-taken", port=port, host=host, step=step.name, why=why
        ) from None


def _look_up(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(
            str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        )
    except OSError:
        raise UsageError("host-not-found", host=host, here=socket.gethostname()) from None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
