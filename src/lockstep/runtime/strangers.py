"""Which users of this host have connected to ports that a library opened.

Every local user can connect to a loopback port, and gloo accepts every connection.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from lockstep.errors import LockstepError, PeerFailed

_TRIES = 3  # the table may change while it is read
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
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
    # as the tables write them
    port_pairs = [(f"{remote[1]:04X}", f"{local[1]:04X}") for remote, local in connections]
    for _ in range(_TRIES):
        users: dict[tuple[str, str], set[int]] = {ports: set() for ports in port_pairs}
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with suppress(OSError):
                _, *lines = Path(table).read_text().splitlines()
                for line in lines:
                    # seen from the other end: its own address comes first
                    _, remote, local, rest = line.split(None, 3)
                    ports = (remote[-4:], local[-4:])
                    if ports in users:
                        _, _, _, _, user, _, inode, *_ = rest.split()
                        if inode != _GONE:
                            users[ports].add(int(user))
        if all(users.values()):
            break
    return [users[ports] for ports in port_pairs]


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
    before, _ = _own_sockets()
    yield
    listening, connections = _own_sockets()
    ports = listening - before
    callers = []
    for remote, local in connections:
        if local[1] in ports and _on_this_host(remote, local):
            callers.append((remote, local))
    if not callers:
        return
    own = os.geteuid()
    for users in owners(callers):
        if not users:
            raise PeerFailed("caller-gone", what=library)
        for user in users - {own}:
            raise LockstepError("caller-of-another-user", user=user, own=own, what=library)


def _own_sockets() -> tuple[set[int], list[Connection]]:
    """Return the ports at which this process listens over TCP, and its connections.

    Each socket is asked. The system's tables list the sockets of all processes: with N ranks on the
    host, each rank would read N x N lines.
    """
    listening: set[int] = set()
    connections: list[Connection] = []
    for entry in os.scandir("/proc/self/fd"):
        with suppress(OSError):  # closed by another thread meanwhile, or not connected
            if not os.readlink(entry.path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as own:
                if own.type != socket.SOCK_STREAM or own.family not in _FAMILIES:
                    continue
                local = own.getsockname()[:2]
                if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(local[1])
                else:
                    connections.append((own.getpeername()[:2], local))
    return listening, connections


def _on_this_host(remote: Address, local: Address) -> bool:
    host = remote[0].removeprefix("::ffff:")
    return bool(host == local[0].removeprefix("::ffff:") or ip_address(host).is_loopback)
