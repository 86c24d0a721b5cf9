"""Names, addresses, interfaces and ports, as the ranks will use them."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from lockstep.doctor.finding import Finding, judged

Resolve = Callable[[str], Sequence[str]]
_SIOCGIFADDR = 0x8915
_PAUSE = 0.1


def addresses_of(name: str) -> list[str]:
    """Its IPv4 addresses; none where it cannot be resolved."""
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)))
    except OSError:
        return []


def is_local(address: str) -> bool:
    """Whether it is one of this host's."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def towards(peer: str) -> str | None:
    """This host's address on the interface over which packets go to `peer`; None where there is no way. Sends nothing."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    if sys.platform != "linux":
        return {}
    found = {}
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_name(name: str, resolve: Resolve, *, several_hosts: bool) -> Finding:
    """What this host's own name resolves to. gloo and torchrun tell other hosts to connect to that."""
    found = resolve(name)
    value = f"{name} is {', '.join(found) if found else 'unknown'}"
    if not found:
        why = f"this host's name {name!r} does not resolve: add it to /etc/hosts"
        return (
            judged("own name", value, fix=why)
            if several_hosts
            else judged("own name", value, warn=f"{why} (Lockstep does not need it on one host; torchrun does)")
        )
    if several_hosts and all(ipaddress.ip_address(each).is_loopback for each in found):
        why = f"{name!r} resolves to {found[0]}, which others cannot reach: give it this host's network address in /etc/hosts (Debian has 127.0.1.1 there)"
        return judged("own name", value, fix=why)
    return judged("own name", value)


def used(every: Mapping[str, str], address: str, asked: str | None) -> Finding:
    """The interface over which ranks will talk: that of `address`, or the one that GLOO_SOCKET_IFNAME asks for."""
    listed = ", ".join(f"{name} {each}" for name, each in every.items()) or "unknown"
    mine = next((name for name, each in every.items() if each == address or (name == "lo" and address.startswith("127."))), None)
    if asked and every and asked not in every:
        return judged(
            "interfaces",
            listed,
            fix=f"GLOO_SOCKET_IFNAME={asked} names no interface with an address here ({listed}): unset it, or name one of them",
        )
    if asked and mine and asked != mine:
        warn = f"GLOO_SOCKET_IFNAME={asked}, but {mine} reaches the peers: unset it unless that is meant"
        return judged("interfaces", f"{listed}; used: {asked}", warn=warn)
    return judged("interfaces", f"{listed}; used: {mine or address}")


def loopback_port() -> Finding:
    """Whether processes of this host can connect to each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=3):
            return judged("loopback", f"127.0.0.1:{server.getsockname()[1]} can be reached")
    except OSError as error:
        why = f"processes of this host cannot connect to 127.0.0.1 ({error.strerror or error}): bring lo up (`ip link set lo up`), and look at the firewall"
        return judged("loopback", "127.0.0.1 cannot be reached", fix=why)


def try_to_reach(address: str, port: int, seconds: float) -> str:
    """ "" as soon as a connection is accepted there; after `seconds`, what the last try ended with."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.05, min(2.0, deadline - time.monotonic()))).close()
            return ""
        except OSError as error:
            why = "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno) if error.errno else str(error)
        if time.monotonic() >= deadline:
            return why
        time.sleep(_PAUSE)
