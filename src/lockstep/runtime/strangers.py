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
    port_pairs = [(remote[1], local[1]) for remote, local in connections]
    for _ in range(_TRIES):
        users: dict[tuple[int, int], set[int]] = {ports: set() for ports in port_pairs}
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with suppress(OSError):
                _, *lines = Path(table).read_text().splitlines()
                for line in lines:
                    # seen from the other end: its own address comes first
                    _, remote, local, _, _, _, _, user, _, inode, *_ = line.split()
                    ports = (_port(remote), _port(local))
                    if inode != _GONE and ports in users:
                        users[ports].add(int(user))
        if all(users.values()):
            break
    return [users[ports] for ports in port_pairs]


def _port(address: str) -> int:
    """Return the port of "0100007F:1F90"."""
    return int(address.rpartition(":")[2], 16)


@contextmanager
def no_strangers(library: str) -> Iterator[None]:
    """At the block's end, check which users of this host have connected to the ports that `library`
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
    callers = []
    for socket in sockets:
        if socket.raddr and socket.laddr.port in ports and _on_this_host(socket):
            callers.append((socket.raddr, socket.laddr))
    if not callers:
        return
    own = os.geteuid()
    for users in owners(callers):
        if not users:
            raise PeerFailed("caller-gone", what=library)
        for user in users - {own}:
            raise LockstepError("caller-of-another-user", user=user, own=own, what=library)


def _listening(sockets: Sequence[Any]) -> set[int]:
    return {socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN}


def _on_this_host(socket: Any) -> bool:
    remote = socket.raddr.ip.removeprefix("::ffff:")
    local = socket.laddr.ip.removeprefix("::ffff:")
    return bool(remote == local or ip_address(remote).is_loopback)
