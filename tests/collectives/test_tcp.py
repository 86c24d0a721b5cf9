"""What the kernel says of this process's connections."""

from __future__ import annotations

import itertools
import os
import socket
import sys

import pytest

from lockstep.collectives.tcp import Connection, _address, _is_here, connections
from lockstep.training.anatomy import LinkCounters, by_host

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO as Linux has it")


def connected(monkeypatch: pytest.MonkeyPatch, size: int) -> Connection:
    """A connection over loopback, taken for one to another host, over which so many bytes went."""

    monkeypatch.setattr("lockstep.collectives.tcp._is_here", lambda host, here: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours, server.accept()[0] as theirs:
            ours.sendall(b"x" * size)
            while size:
                size -= len(theirs.recv(65536))
            (found,) = (each for each in connections() if each.ends[1] == f"127.0.0.1:{port}")
            return found


def test_bytes_that_were_sent_are_counted_and_descriptors_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = connected(monkeypatch, 100_000)
    assert found.sent == 100_000
    assert found.host == "127.0.0.1"
    assert found.retransmitted == 0
    assert 0 < found.round_trip < 10
    assert 0 <= found.busy < 10
    assert found.rate > 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_goes_to_this_host_is_no_link() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0],
    ):
        assert f"127.0.0.1:{ours.getpeername()[1]}" not in {each.ends[1] for each in connections()}


def test_an_ipv4_address_is_itself_in_an_ipv6_socket_too() -> None:
    assert _address("::ffff:10.0.0.2") == _address("10.0.0.2") == "10.0.0.2"
    assert _address("fe80::1%wire0") == "fe80::1"
    assert _is_here("10.0.0.2", "10.0.0.2")
    assert _is_here("127.0.0.1", "10.0.0.2")
    assert not _is_here("10.0.0.3", "10.0.0.2")


def connection(port: int, host: str, *figures: float) -> Connection:
    """From this port here to port 1 there."""
    return Connection((f"10.0.0.1:{port}", f"{host}:1"), "10.0.0.1", host, *figures)  # type: ignore[arg-type]


def test_rows_are_of_what_happened_since_the_last_look_by_host() -> None:
    first = connection(1, "10.0.0.2", 0.001, 2.0, 1000, 1, 5e6)
    found = [
        connection(1, "10.0.0.2", 0.002, 2.5, 1600, 3, 4e6),
        connection(7, "10.0.0.2", 0.001, 0.25, 50, 0, 6e6),
        connection(8, "10.0.0.3", 0.004, 1.0, 70, 0, 1e6),
    ]
    assert by_host({first.ends: first}, found) == [
        {
            "here": "10.0.0.1",
            "peer": "10.0.0.2",
            "rtt": 0.002,
            "busy": 0.75,
            "sent": 650,
            "retransmitted": 2,
            "rate": 6e6,
        },
        {
            "here": "10.0.0.1",
            "peer": "10.0.0.3",
            "rtt": 0.004,
            "busy": 1.0,
            "sent": 70,
            "retransmitted": 0,
            "rate": 1e6,
        },
    ]


def test_a_port_that_is_used_again_begins_anew() -> None:
    first = connection(1, "10.0.0.2", 0.001, 2.0, 1000, 1, 5e6)
    (row,) = by_host({first.ends: first}, [connection(1, "10.0.0.2", 0.001, 0.5, 60, 0, 5e6)])
    assert (row["busy"], row["sent"], row["retransmitted"]) == (0.5, 60, 0)


def test_looks_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    asked: list[float] = []
    monkeypatch.setattr("lockstep.training.anatomy.time.monotonic", lambda: now[0])
    monkeypatch.setattr("lockstep.training.anatomy.connections", lambda: asked.append(now[0]) or [])
    links = LinkCounters()
    for _ in range(1000):
        links.look()
        now[0] += 0.1
    links.look(now_or_never=True)
    assert asked.pop() == now[0]
    assert 10 < len(asked) < 60
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(asked))
