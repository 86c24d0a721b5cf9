"""Names, addresses and ports: planted answers, and the loopback of this host."""

from __future__ import annotations

import pytest

from lockstep.tools.doctor import network

_EVERY = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}


@pytest.mark.parametrize(
    ("answer", "level", "said"),
    [
        (["10.0.0.5"], "ok", ""),
        (["127.0.1.1"], "ok", ""),
        ([], "warn", "this host's name 'node7' does not resolve: add it to /etc/hosts"),
    ],
)
def test_own_name(answer: list[str], level: str, said: str) -> None:
    found = network.own_name("node7", lambda name: answer)
    assert found.level == level
    assert found.fix.startswith(said)


def test_the_interface_that_is_used() -> None:
    assert (
        network.used(_EVERY, "10.0.0.5", None).value
        == "lo 127.0.0.1, eth0 10.0.0.5, ib0 10.1.0.5; used: eth0"
    )
    assert network.used(_EVERY, "127.0.0.1", None).value.endswith("used: lo")
    assert network.used(_EVERY, "10.0.0.5", "eth0").level == "ok"
    assert network.used(_EVERY, "10.0.0.5", "ib0").fix.startswith(
        "GLOO_SOCKET_IFNAME=ib0, but eth0 reaches the peers"
    )
    wrong = network.used(_EVERY, "10.0.0.5", "eth9")
    assert (wrong.level, wrong.fix[:47]) == (
        "fix",
        "GLOO_SOCKET_IFNAME=eth9 names no interface with",
    )


def test_what_is_this_hosts() -> None:
    assert network.interfaces()["lo"] == "127.0.0.1"
    assert network.loopback_port().level == "ok"


def test_names_that_do_not_resolve_have_no_address() -> None:
    assert network.addresses_of("localhost") == ["127.0.0.1"]
    assert network.addresses_of("no such name") == []
