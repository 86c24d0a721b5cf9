"""Names, addresses, interfaces and ports, as the ranks will use them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence

import psutil

from lockstep.tools.finding import Finding, judged

Resolve = Callable[[str], Sequence[str]]


def addresses_of(name: str) -> list[str]:
    """Its IPv4 addresses; none where it cannot be resolved."""
    try:
        return list(
            dict.fromkeys(
                str(found[4][0])
                for found in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            )
        )
    except OSError:
        return []


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    every = psutil.net_if_addrs().items()
    return {
        name: each.address
        for name, found in every
        for each in found
        if each.family == socket.AF_INET
    }


def own_name(name: str, resolve: Resolve) -> Finding:
    """What this host's own name resolves to. torchrun tells others to connect to that."""
    found = resolve(name)
    value = f"{name} is {', '.join(found) if found else 'unknown'}"
    why = (
        f"this host's name {name!r} does not resolve: add it to /etc/hosts (Lockstep does not need"
        " it on one host; torchrun does)"
    )
    return judged("own name", value, warn="" if found else why)


def used(every: Mapping[str, str], address: str, asked: str | None) -> Finding:
    """The interface over which ranks will talk: that of `address`, or the one that
    GLOO_SOCKET_IFNAME asks for.
    """
    listed = ", ".join(f"{name} {each}" for name, each in every.items()) or "unknown"
    mine = next(
        (
            name
            for name, each in every.items()
            if each == address or (name == "lo" and address.startswith("127."))
        ),
        None,
    )
    if asked and every and asked not in every:
        return judged(
            "interfaces",
            listed,
            fix=(
                f"GLOO_SOCKET_IFNAME={asked} names no interface with an address here ({listed}):"
                " unset it, or name one of them"
            ),
        )
    if asked and mine and asked != mine:
        warn = (
            f"GLOO_SOCKET_IFNAME={asked}, but {mine} reaches the peers: unset it unless that is"
            " meant"
        )
        return judged("interfaces", f"{listed}; used: {asked}", warn=warn)
    return judged("interfaces", f"{listed}; used: {mine or address}")


def loopback_port() -> Finding:
    """Whether processes of this host can connect to each other."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=3),
        ):
            return judged("loopback", f"127.0.0.1:{server.getsockname()[1]} can be reached")
    except OSError as error:
        why = (
            f"processes of this host cannot connect to 127.0.0.1 ({error.strerror or error}): bring"
            " lo up (`ip link set lo up`), and look at the firewall"
        )
        return judged("loopback", "127.0.0.1 cannot be reached", fix=why)
