"""Which users own the other ends of this process's TCP connections on this host, as the kernel's
table says. Linux only.

A port on loopback can be connected to by every local user. Who may talk to a rank is this user
alone: the gate before the ranks' store asks here for each connection (host_store.py), and gloo's
connections, which gloo itself accepts from anybody, are looked at once they stand.
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
_GONE = "0"  # inode of a socket that its process has closed; its user is no longer known

Address = tuple[str, int]
Connection = tuple[Address, Address]
"""There and here."""


def owners(connections: Sequence[Connection]) -> list[set[int]]:
    """Of each connection, the user of its other end on this host; nobody where it is gone.

    Only ports are compared. Where other addresses have connected the same two ports, their users
    are among them.
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
    """At the block's end, check who from this host has connected to the ports that were opened in
    it (`what` opened them).

    Raises:
        LockstepError: another user has.
        PeerFailed: somebody has, and is gone again.
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
