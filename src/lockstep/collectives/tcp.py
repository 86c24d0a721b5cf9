"""This process's TCP connections to other hosts, as the kernel sees them: which link is slow,
without a message of ours. Linux only.

busy            seconds in which octets were under way to the other side: of a link that keeps
                everybody waiting, most of the time
rate            bytes a second that the other side has last confirmed
round trip      latency, smoothed by the kernel
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

_INFO = 256  # bytes; a kernel that knows less gives less
# where they stand in the kernel's struct tcp_info (include/uapi/linux/tcp.h)
_ROUND_TRIP, _RATE, _BUSY, _SENT = 68, 160, 168, 200
_RETRANSMITTED = 100
_ESTABLISHED = 1


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection since it was opened; seconds and bytes."""

    ends: tuple[str, str]
    """Address and port here and there."""
    here: str
    """The address here."""
    host: str
    """The peer's."""
    round_trip: float
    busy: float
    sent: int
    retransmitted: int
    """Packets."""
    rate: float


def connections() -> Iterator[Connection]:
    """Those of this process to other hosts, that are open. Nothing where the system does not
    tell.
    """
    if not hasattr(socket, "TCP_INFO"):
        return
    for number in _descriptors():
        with suppress(OSError, ValueError):
            if (found := _connection(number)) is not None:
                yield found


def _descriptors() -> list[int]:
    folder = Path("/proc/self/fd")
    return [int(each.name) for each in folder.iterdir()] if folder.is_dir() else []


def _connection(number: int) -> Connection | None:
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return None
    with socket.socket(fileno=os.dup(number)) as found:
        if (
            found.family not in (socket.AF_INET, socket.AF_INET6)
            or found.type != socket.SOCK_STREAM
        ):
            return None
        there, near = found.getpeername(), found.getsockname()
        host, here = _address(there[0]), _address(near[0])
        octets = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO)
        if _is_here(host, here) or len(octets) < _SENT + 8 or octets[0] != _ESTABLISHED:
            return None
    (round_trip,) = struct.unpack_from("=I", octets, _ROUND_TRIP)
    (retransmitted,) = struct.unpack_from("=I", octets, _RETRANSMITTED)
    rate, busy = struct.unpack_from("=QQ", octets, _RATE)
    (sent,) = struct.unpack_from("=Q", octets, _SENT)
    ends = (f"{here}:{near[1]}", f"{host}:{there[1]}")
    return Connection(
        ends, here, host, round_trip / 1e6, busy / 1e6, sent, retransmitted, float(rate)
    )


def _address(text: str) -> str:
    """An IPv4 address as such also where the socket is an IPv6 one."""
    found = ip_address(text.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def _is_here(host: str, here: str) -> bool:
    return host == here or ip_address(host).is_loopback
