"""This process's TCP connections to other hosts, as the kernel sees them. They show which link is
slow, without extra messages. Linux only.

busy            seconds in which bytes were on their way to the peer; on a link for which all ranks
                wait, that is most of the time
rate            bytes per second that the peer confirmed most recently (delivery rate)
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

_INFO = 256  # bytes to ask for; an older kernel returns fewer
# byte offsets in the kernel's struct tcp_info (include/uapi/linux/tcp.h)
_ROUND_TRIP, _RATE, _BUSY, _SENT = 68, 160, 168, 200
_RETRANSMITTED = 100
_ESTABLISHED = 1


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection, since it was opened. Times are in seconds, amounts in bytes."""

    ends: tuple[str, str]
    """Address and port of this host, and of the peer."""
    here: str
    """The address of this host."""
    host: str
    """The address of the peer."""
    round_trip: float
    busy: float
    sent: int
    retransmitted: int
    """A number of packets."""
    rate: float


def connections() -> Iterator[Connection]:
    """Yield the open TCP connections of this process to other hosts. Yields nothing if the system
    has no TCP_INFO.
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
    """Return an address as text. An IPv4 address in IPv6 form becomes plain IPv4."""
    found = ip_address(text.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def _is_here(host: str, here: str) -> bool:
    return host == here or ip_address(host).is_loopback
