"""Which users of this host have connected to ports that a library opened.

Every local user can connect to a loopback port, and gloo accepts every connection.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import LockstepError, PeerFailed

_TRIES = 3  # the table may change while it is read
_GONE = "0"  # inode of a socket that its process has closed: its user is no longer known

Address = tuple[str, int]
Connection = tuple[Address, Address]
"""The addresses of a connection's two ends: the remote end, then this process's end."""


def owners(connections: Sequence[Connection]) -> list[set[int]]:
    """Return, for each connection, the users of its other end on this host; an empty set if it is
    closed.

    Only ports are compared. If other addresses have a connection between the same two ports, the
    set has their users too.
    """
    wanted = [(f"{there[1]:04X}", f"{here[1]:04X}") for there, here in connections]
    for _ in range(_TRIES):
        found: dict[tuple[str, str], set[int]] = {ports: set() for ports in wanted}
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with suppress(OSError):
                for line in Path(table).read_text().splitlines()[1:]:
                    _, there, here, _, _, _, _, user, _, inode, *_ = line.split()
                    ports = there.rpartition(":")[2], here.rpartition(":")[2]
                    if inode != _GONE and ports in found:
                        found[ports].add(int(user))
        if all(found.values()):
            break
    return [found[ports] for ports in wanted]


@contextmanager
def no_strangers(what: str) -> Iterator[None]:
    """At the block's end, check which users of this host have connected to the ports that `what`
    opened in the block.

    Raises:
        LockstepError: another user has connected.
        PeerFailed: a process has connected and closed its end, so that its user is unknown.
    """
    if sys.platform != "linux":
        yield
        return
    process = psutil.Process()
    before = _listening(process.net_connections("tcp"))
    yield
    sockets = process.net_connections("tcp")
    ports = _listening(sockets) - before
    callers = [
        (each.raddr, each.laddr)
        for each in sockets
        if each.raddr and each.laddr.port in ports and _on_this_host(each)
    ]
    for users in owners(callers) if callers else ():
        if not users:
            raise PeerFailed("caller-gone", what=what)
        for user in users - {os.geteuid()}:
            raise LockstepError("caller-of-another-user", user=user, own=os.geteuid(), what=what)


def _listening(sockets: Sequence[Any]) -> set[int]:
    return {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}


def _on_this_host(connection: Any) -> bool:
    there, here = (each.ip.removeprefix("::ffff:") for each in (connection.raddr, connection.laddr))
    return there == here or ip_address(there).is_loopback
