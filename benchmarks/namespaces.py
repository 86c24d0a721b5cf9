"""Hosts with a slow way out: network namespaces of this machine, each with a link to one switch, of
the same rate in both directions.

    host 0 --- rate ---+
    host 1 --- rate ---+ switch          what leaves a host and what arrives at it are limited, as
                                         at a network card
    host 2 --- rate ---+

They share the machine's cores and files. Needs root, ip and tc (iproute2).

With a delay, a process (wire.py) carries the packets in place of the switch and tc: the kernel that
this was written on cannot delay them. It takes a part of a core, the more the faster the link is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from wire import carried

INTERFACE = "wire0"
_TOOLS = ("ip", "tc")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SLOWEST, _FASTEST = 10e6, 10e9  # bits per second


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace and its address."""

    namespace: str
    address: str

    def start(
        self, words: list[str], *, environment: dict[str, str], log: str
    ) -> subprocess.Popen[bytes]:
        """Run a command there, its output in a file."""
        with open(log, "wb") as out:
            command = ["ip", "netns", "exec", self.namespace, *words]
            return subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)


def bits_per_second(rate: str) -> float:
    """`100mbit` as tc writes it. Raises ValueError for what is no rate from 10mbit to 10gbit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    bits = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not _SLOWEST <= bits <= _FASTEST:
        raise ValueError(f"--rate {rate}: give a rate from 10mbit to 10gbit, such as 100mbit")
    return bits


def why_not() -> str | None:
    """Why hosts cannot be made here, in words; None where they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces and rates need root"
    probe = f"lsp{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return None


def variables_of(rank: int, made: Sequence[Host], per_host: int = 1) -> dict[str, str]:
    """The environment of a rank on these hosts, of which each has so many. All of them share the
    cores of this machine, so a rank has one thread.
    """
    node, local = divmod(rank, per_host)
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(made) * per_host),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": made[0].address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def hosts(count: int, rate: str | None, delay: float = 0.0) -> Iterator[list[Host]]:
    """So many hosts around a switch; None: links without a limit. Nothing is left of them, nor
    of what runs in them.

    Args:
        count: hosts.
        rate: of each link, in each direction.
        delay: seconds from host to host; needs a rate.
    """
    tag = f"lsl{os.getpid()}"
    switch = f"{tag}s"
    made: list[Host] = []
    if delay and rate is not None:
        made = [Host(f"{tag}h{number}", f"10.79.0.{number + 1}") for number in range(count)]
        try:
            for host in made:
                _ip("netns", "add", host.namespace)
            with carried(made, INTERFACE, bits_per_second(rate), delay):
                for host in made:
                    _open(host)
                yield made
        finally:
            _remove(made)
        return
    _ip("netns", "add", switch)
    try:
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number in range(count):
            host = Host(f"{tag}h{number}", f"10.79.0.{number + 1}")
            made.append(host)  # before it is made: a signal may come in between
            _ip("netns", "add", host.namespace)
            port = f"port{number}"
            _ip(
                "-n",
                host.namespace,
                "link",
                "add",
                INTERFACE,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch,
            )
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _open(host)
            if rate is not None:
                _limit(host.namespace, INTERFACE, rate)
                _limit(switch, port, rate)
        yield made
    finally:
        _remove(made)
        subprocess.run(["ip", "netns", "del", switch], check=False)


def _open(host: Host) -> None:
    """Give a host's interface its address, and bring it up."""
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _ip("-n", host.namespace, "link", "set", INTERFACE, "up")
    _ip("-n", host.namespace, "link", "set", "lo", "up")


def _remove(made: list[Host]) -> None:
    """End what runs in these hosts, and remove them."""
    for host in made:
        for pid in subprocess.run(
            ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=False
        ).stdout.split():
            subprocess.run(["kill", "-9", pid], check=False)
        subprocess.run(["ip", "netns", "del", host.namespace], check=False)


def change_rate(host: Host, number: int, rate: str) -> None:
    """Give one of `hosts`, the one with that number, another rate, both ways."""
    _limit(host.namespace, INTERFACE, rate, "change")
    _limit(f"{host.namespace.removesuffix(f'h{number}')}s", f"port{number}", rate, "change")


def _limit(namespace: str, device: str, rate: str, what: str = "add") -> None:
    """A bucket of two milliseconds: small beside what a gradient takes, large enough for the
    rate to be reached.
    """
    burst = max(64 * 1024, int(bits_per_second(rate) / 8 * 0.002))
    words = [
        "qdisc",
        what,
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        str(burst),
        "latency",
        "200ms",
    ]
    subprocess.run(["tc", "-n", namespace, *words], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
