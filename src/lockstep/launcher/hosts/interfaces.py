"""Addresses and the interfaces that have them."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import sys
import threading
from collections.abc import Iterator

from lockstep.errors import UsageError

DEFAULT_PORT = 29400


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))  # of Linux: sa_family_t first


class _Interface(ctypes.Structure):
    pass


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
]


def addresses() -> Iterator[tuple[str, str]]:
    """(interface, address) of this host; nothing where the system is not Linux."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        at = first
        while at:
            entry = at.contents
            if entry.address:
                octets = bytes(entry.address.contents.data)
                if entry.address.contents.family == socket.AF_INET:
                    yield entry.name.decode(), socket.inet_ntop(socket.AF_INET, octets[2:6])
                elif entry.address.contents.family == socket.AF_INET6:
                    yield entry.name.decode(), socket.inet_ntop(socket.AF_INET6, octets[6:22])
            at = entry.next
    finally:
        libc.freeifaddrs(first)


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address."""
    return next((name for name, found in addresses() if found == address), None)


def host_and_port(text: str) -> tuple[str, int]:
    """`node1`, `10.0.0.1:29400`, `[fd00::1]:29400`. Raises UsageError for anything else."""
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or (":" in host and "[" not in text):
        raise UsageError(f"--meet {text}: write HOST, HOST:PORT or [ADDRESS]:PORT, the first host as all hosts know it")
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise UsageError(f"--meet {text}: port {port!r} does not lie in 1..65535")
    return host, int(port)


def resolved(host: str, seconds: float) -> str:
    """The address of a host, IPv4 if it has one. Raises UsageError where the name says nothing to this host, or nobody answers in time."""
    found: list[str | OSError] = []

    def look() -> None:
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.append(str(min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0]))
        except (OSError, UnicodeError) as error:
            found.append(error if isinstance(error, OSError) else OSError(0, str(error)))

    thread = threading.Thread(target=look, name="lockstep-resolve", daemon=True)
    thread.start()
    thread.join(seconds)
    answer = found[0] if found else OSError(0, f"no answer in {seconds:g} s")
    if isinstance(answer, OSError):
        raise UsageError(
            f"--meet {host}: {socket.gethostname()} cannot resolve this name ({answer.strerror}); give the first host's address, or a name that all hosts know"
        )
    return answer


def remark(address: str) -> str | None:
    """What is to be said of an address on which a meeting listens."""
    known = ipaddress.ip_address(address)
    if known.is_global:
        return f"{address} is a public address: have a firewall admit the hosts of this job only"
    if known.is_loopback:
        return f"{address} is loopback, which other hosts cannot reach: give --meet an address of the network that they share"
    return None


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
