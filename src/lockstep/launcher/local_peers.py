"""Which users own the other ends of this process's TCP connections on this host, as the kernel's table says. Linux only.

A port on loopback can be connected to by every local user. Who may talk to a rank is this user alone: the gate before the ranks' store asks
here for each connection (host_store.py), and gloo's connections, which gloo itself accepts from anybody, are looked at once they stand.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from lockstep.errors import LockstepError, PeerFailed

_TRIES = 3  # the table may change while it is read
_GONE = "0"  # inode of a socket that its process has closed; its user is no longer known

Address = tuple[str, int]
Connection = tuple[Address, Address]
"""There and here."""


def owner_of(caller: Address, here: Address) -> int | None:
    """The user whose socket on this host is connected from `caller` to `here`; None where nobody's is (any more)."""
    return owners([(caller, here)])[0]


def owners(connections: Sequence[Connection]) -> list[int | None]:
    """Of each connection, the user of its other end."""
    wanted = [(_in_kernel(there), _in_kernel(here)) for there, here in connections]
    found: dict[tuple[str, str], int] = {}
    for _ in range(_TRIES):
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with suppress(OSError):
                for line in Path(table).read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[9] != _GONE:
                        found[_short(fields[1]), _short(fields[2])] = int(fields[7])
        if all(each in found for each in wanted):
            break
    return [found.get(each) for each in wanted]


@contextmanager
def no_strangers(what: str) -> Iterator[None]:
    """At the block's end, check who from this host has connected to the ports that were opened in it (`what` opened them).

    Raises:
        LockstepError: another user has.
        PeerFailed: somebody has, and is gone again.
    """
    if sys.platform != "linux":
        yield
        return
    before = {port for port, _ in _sockets() if isinstance(port, int)}
    yield
    sockets = list(_sockets())
    ports = {port for port, _ in sockets if isinstance(port, int)} - before
    callers = [each for _, each in sockets if each is not None and each[1][1] in ports and _on_this_host(each)]
    for user in owners(callers) if callers else ():
        if user is None:
            raise PeerFailed(f"a process that had connected to this rank ({what}) has ended")
        if user != os.geteuid():
            raise LockstepError(
                f"user {user} of this host has connected to a port that {what} opened for the ranks of user {os.geteuid()}: "
                "nothing was sent; start the ranks again, and find out who that is"
            )


def _sockets() -> Iterator[tuple[int | None, Connection | None]]:
    """This process's TCP sockets: the port of one that listens, the ends of one that is connected."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            number = int(name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                    continue
                here = found.getsockname()[:2]
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield here[1], None
                else:
                    yield None, (found.getpeername()[:2], here)


def _on_this_host(connection: Connection) -> bool:
    there, here = (_plain(address) for address, _ in connection)
    return there == here or there.is_loopback


def _plain(address: str) -> IPv4Address | IPv6Address:
    """IPv4 also where the socket is an IPv6 one."""
    found = ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def _in_kernel(address: Address) -> str:
    """As the table writes it: words of four bytes, each in the order of this machine."""
    octets = _plain(address[0]).packed
    words = struct.unpack(f"={len(octets) // 4}I", octets)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


def _short(text: str) -> str:
    """An IPv4 address of an IPv6 socket without what stands before it."""
    return text[24:] if len(text) > 32 and text[:24] == _MAPPED else text


_MAPPED = "".join(f"{word:08X}" for word in struct.unpack("=3I", bytes(10) + b"\xff\xff"))
