"""Addresses: how they are written, what has them, what is said of them."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from lockstep.errors import UsageError
from lockstep.launcher.hosts import interfaces
from lockstep.launcher.hosts.interfaces import family_of, host_and_port, interface_of, remark, resolved


def test_a_host_and_a_port_are_read() -> None:
    assert host_and_port("node1") == ("node1", 29400)
    assert host_and_port("node1:80") == ("node1", 80)
    assert host_and_port("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert host_and_port("[fd00::1]") == ("fd00::1", 29400)
    assert host_and_port("[fd00::1]:8") == ("fd00::1", 8)
    assert family_of("fd00::1") == socket.AF_INET6
    assert family_of("10.0.0.1") == socket.AF_INET


@pytest.mark.parametrize("text", ["", ":80", "node1:", "node1:x", "node1:0", "node1:65536", "fd00::1", "a:b:1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--meet {text}"):
        host_and_port(text)


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are listed on Linux only")
def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
    names = {name for _, name in socket.if_nameindex()}
    assert {name for name, _ in interfaces.addresses()} <= names


def test_names_are_resolved_or_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved("127.0.0.1", 5) == "127.0.0.1"
    assert resolved("localhost", 5) == "127.0.0.1"
    with pytest.raises(UsageError, match=r"--meet no-such-host.invalid: .* cannot resolve this name .*; give the first host's address"):
        resolved("no-such-host.invalid", 5)
    answered = threading.Event()
    entries = socket.getaddrinfo("127.0.0.1", None)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(60) and entries)
    with pytest.raises(UsageError, match=r"cannot resolve this name \(no answer in 0.01 s\)"):
        resolved("node1", 0.01)
    answered.set()


def test_what_is_said_of_an_address() -> None:
    assert remark("10.0.0.1") is None
    assert "public address: have a firewall admit" in str(remark("8.8.8.8"))
    assert "loopback, which other hosts cannot reach" in str(remark("127.0.1.1"))
