"""Addresses of this host, and the interfaces that have them."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from lockstep.errors import UsageError


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address."""
    return next(
        (
            name
            for name, found in psutil.net_if_addrs().items()
            for each in found
            if each.address == address
        ),
        None,
    )


def towards(peer: str) -> str:
    """This host's address on the interface over which packets go to `peer`. Sends nothing.
    Raises OSError where there is no way.
    """
    family, kind, _, _, there = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(there)
        return str(way.getsockname()[0])


def gloo_and_nccl(address: str, env: Mapping[str, str]) -> dict[str, str]:
    """Variables for ranks: gloo and NCCL use the interface that reaches the other hosts, unless
    `env` names another.
    """
    interface = interface_of(address)
    names = (
        {}
        if interface is None
        else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    )
    return {name: value for name, value in names.items() if name not in env}


def host_and_port(text: str, option: str) -> tuple[str, int]:
    """`node1:29400`, `[fd00::1]:29400`. Raises UsageError, which names `option`, for anything
    else.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    named = colon and host and (":" not in host or "[" in text)
    if not named or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UsageError("not-an-endpoint", name=option, value=text)
    return host, int(port)
