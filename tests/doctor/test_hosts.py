"""Several hosts: network namespaces as hosts where this may make them; and what goes wrong before they have met."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.doctor import hosts, network
from lockstep.errors import UsageError

ROOT = Path(__file__).parents[2]
_NAMES = ("alpha", "beta")
_SPACES = {name: f"lockstep-doctor-{name}" for name in _NAMES}
_ADDRESSES = {"alpha": "10.78.0.1", "beta": "10.78.0.2"}


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _why_not() -> str:
    if os.getuid() != 0:
        return "making network namespaces needs root"
    made = subprocess.run(["ip", "netns", "add", "lockstep-doctor-try"], capture_output=True, check=False) if _has_ip() else None
    if made is None or made.returncode:
        return "this system makes no network namespaces (ip, of iproute2)"
    _do("ip", "netns", "del", "lockstep-doctor-try")
    return ""


def _has_ip() -> bool:
    return any(Path(folder, "ip").exists() for folder in ("/sbin", "/usr/sbin", "/bin", "/usr/bin"))


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Two namespaces, alpha and beta to each other and to themselves, with a link that carries 40 Mbit/s from alpha to beta."""
    if why := _why_not():
        pytest.skip(why)
    files = {name: Path("/etc/netns", space, "hosts") for name, space in _SPACES.items()}
    try:
        for name, space in _SPACES.items():
            _do("ip", "netns", "add", space)
            files[name].parent.mkdir(parents=True)
            known = [*(f"{address} {each}" for each, address in _ADDRESSES.items()), f"{_ADDRESSES[name]} {socket.gethostname()}"]
            files[name].write_text("127.0.0.1 localhost\n" + "\n".join(known) + "\n")
        _do("ip", "link", "add", "ls-doctor-a", "type", "veth", "peer", "name", "ls-doctor-b")
        for name, link in zip(_NAMES, ("ls-doctor-a", "ls-doctor-b"), strict=True):
            space = _SPACES[name]
            _do("ip", "link", "set", link, "netns", space)
            _do("ip", "-n", space, "addr", "add", f"{_ADDRESSES[name]}/24", "dev", link)
            _do("ip", "-n", space, "link", "set", link, "up")
            _do("ip", "-n", space, "link", "set", "lo", "up")
        limit = ["rate", "40mbit", "burst", "32kb", "latency", "100ms"]
        _do("tc", "-n", _SPACES["alpha"], "qdisc", "add", "dev", "ls-doctor-a", "root", "tbf", *limit)
        yield
    finally:
        for name, space in _SPACES.items():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            files[name].unlink(missing_ok=True)
            if files[name].parent.exists():
                files[name].parent.rmdir()


def _doctor(host: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), str(ROOT)) if part)
    words = [sys.executable, "-m", "lockstep", "doctor", *_NAMES, "--json", str(folder / f"{host}.json"), *options]
    return subprocess.Popen(
        ["ip", "netns", "exec", _SPACES[host], *words],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_hosts_meet_and_the_slow_link_is_named_on_both(two_hosts: None, tmp_path: Path) -> None:
    started = {name: _doctor(name, tmp_path, "--wait", "60") for name in _NAMES}
    said = {name: process.communicate() for name, process in started.items()}
    for name in _NAMES:
        assert started[name].returncode == 1, said[name]
        report = json.loads((tmp_path / f"{name}.json").read_text())
        found = {finding["name"]: finding for finding in report["findings"]}
        assert {finding["name"] for finding in report["findings"] if finding["level"] == "fix"} == {"links"}
        assert found["meeting"]["value"] == "2 of 2 hosts, at alpha"
        assert found["hosts"]["value"] == f"alpha 10.78.0.1, beta 10.78.0.2; this is {name}"
        assert found["interfaces"]["value"].endswith(f"used: ls-doctor-{name[0]}")
        assert found["sums"]["value"].endswith("over 2 hosts by native")
        assert found["clocks"]["value"].startswith("beta ")
        assert "alpha to beta: " in found["links"]["fix"]
        (slow,) = [link for link in report["links"] if link["source"] == "alpha"]
        assert slow["bandwidth"] < 6e6  # what tbf lets through
        out = said[name][0].splitlines()
        assert "not fit to train: 1 thing to fix" in out
        assert out[-1].startswith("1. links: slow link")


def test_a_first_host_that_is_not_there_is_named(two_hosts: None, tmp_path: Path) -> None:
    process = _doctor("beta", tmp_path, "--wait", "0.5")
    out, err = process.communicate()
    assert (process.returncode, err) == (1, "")
    last = out.splitlines()[-1]
    assert last.startswith(
        "1. meeting: beta cannot reach alpha (10.78.0.1:29550) within 0.5 s: Connection refused; start the same command there"
    )


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two addresses of which this test says that only the first is this host's."""
    monkeypatch.setattr(network, "is_local", lambda address: address == "127.0.0.1")
    return ["127.0.0.1", "127.0.0.2"]


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def test_a_host_that_does_not_come_is_named(one_of_two: list[str]) -> None:
    found = hosts.examine(one_of_two, _free_port(), 0.2)
    (meeting,) = [finding for finding in found.findings if finding.name == "meeting"]
    assert meeting.value == "1 of 2 hosts, at 127.0.0.1"
    assert meeting.fix.startswith("127.0.0.2 did not come within 0.2 s: start the same command there")
    assert not found.fit


def test_a_port_in_use_is_named(one_of_two: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = hosts.examine(one_of_two, port, 0.2)
    assert found.findings[-1].fix.startswith(f"port {port} of 127.0.0.1 cannot be listened on (Address already in use): end what uses it")


def test_a_name_that_does_not_resolve_is_named(one_of_two: list[str]) -> None:
    found = hosts.examine([*one_of_two[:1], "no-such-host.invalid"], _free_port(), 0.1)
    (names,) = [finding for finding in found.findings if finding.name == "hosts"]
    assert names.fix == "no-such-host.invalid cannot be resolved on 127.0.0.1: correct the name, or add it to /etc/hosts"


def test_a_way_that_is_closed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_CONNECT_SECONDS", 0.0)
    store, closed = dist.HashStore(), _free_port()
    store.set("port/2", json.dumps(["127.0.0.1", closed]))
    store.set("closed/2", json.dumps([["c", "a", "10.0.0.1:5, no answer"]]))
    found = hosts._closed_ways(store, ["a", "b", "c"], [0, 2], 0, "127.0.0.1")
    assert [tuple(way) for way in found] == [("a", "c", f"127.0.0.1:{closed}, Connection refused"), ("c", "a", "10.0.0.1:5, no answer")]


_STRANGER = """
import socket, threading
from lockstep.doctor import hosts, network
network.is_local = lambda address: address == "127.0.0.2"
server, taken = socket.create_server(("127.0.0.1", 0)), []
threading.Thread(target=lambda: [taken.append(server.accept()) for _ in range(9)], daemon=True).start()
print(hosts.examine(["127.0.0.1", "127.0.0.2"], server.getsockname()[1], 0.5).findings[-1].fix, flush=True)
"""


def test_a_stranger_on_the_port_that_says_nothing_is_named() -> None:
    """torch's store would wait for it without end, so the command must be able to leave it."""
    done = subprocess.run([sys.executable, "-c", _STRANGER], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("what listens at 127.0.0.1 (127.0.0.1:")
    assert "is not `lockstep doctor`: end it" in done.stdout


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["alone"], "HOSTS alone: name at least two hosts"),
        (["a", "a"], "HOSTS a a: name at least two hosts, each once"),
        (["127.0.0.1", "127.0.0.2"], "HOSTS: more than one of them is this host"),
        (["192.0.2.200", "192.0.2.201"], "HOSTS: none of them is this host"),
    ],
)
def test_hosts_that_cannot_be_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        hosts.examine(names, 29550, 0.1)


def test_clocks_that_differ_are_named() -> None:
    assert hosts.judge_clocks({"a": 0.0, "b": 0.002}).level == "ok"
    found = hosts.judge_clocks({"a": 0.0, "b": -90.0})
    assert (found.level, found.value) == ("warn", "b -90000.0 ms")
    assert found.fix.startswith("clocks differ from a's, b by -90.0 s")
