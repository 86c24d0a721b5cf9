"""This host's network interfaces: the address on the way to another host, and the variables that
make gloo and NCCL use it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil


def towards(peer: str) -> str:
    """Return this host's address on the interface over which packets go to `peer`. Sends nothing.
    Raises OSError if there is no route.
    """
    family, kind, _, _, remote = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as connection:
        connection.connect(remote)
        return str(connection.getsockname()[0])


def address_of(host: str, port: int | None = None) -> str:
    """Return the address of a host. Raises OSError if its name is unknown."""
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])


def gloo_and_nccl(address: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return variables for ranks that make gloo and NCCL use the interface with `address`. A
    variable that `env` already sets is left out.
    """
    for interface, entries in psutil.net_if_addrs().items():
        if address in [entry.address for entry in entries]:
            names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
            return {name: value for name, value in names.items() if name not in env}
    return {}
