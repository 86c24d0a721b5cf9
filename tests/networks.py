"""Hosts for tests: network namespaces of this machine, joined by a bridge, each with a name.
They share everything else, its files too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.ending import alive, end, kill

_NAMES = ("anna", "bert", "carl")
_ETC = Path("/etc/netns")  # what stands in a namespace's folder there is seen in /etc within it
_TOOLS = ("ip", "ss", "unshare", "hostname")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


@dataclass
class Started:
    """A command on a host."""

    process: subprocess.Popen[str]
    out: str = ""
    err: str = ""

    def end(self, seconds: float = 180) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self.out, self.err = self.process.communicate(timeout=seconds)
        return self.process.returncode, self.out, self.err


@dataclass
class Host:
    """One of them: its namespace, its name, its address, and the interface that has it."""

    namespace: str

    namespace: str
    name: str
    address: str
    interface: str
    started: list[Started] = field(default_factory=list)

    def start(self, *words: str, cwd: Path, **variables: str) -> Started:
        """Run `python words...` there."""
        env = {**os.environ, **variables}
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        command = ["ip", "netns", "exec", self.namespace, *named, sys.executable, *words]
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.started.append(Started(process))
        return self.started[-1]

    def lockstep(self, *words: str, cwd: Path, **variables: str) -> Started:
        return self.start("-m", "lockstep", *words, cwd=cwd, **variables)

    def processes(self) -> list[psutil.Process]:
        """All that live in the namespace."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True
        ).stdout
        found = []
        for pid in listed.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return [process for process in found if alive(process)]

    def agent(self) -> psutil.Process:
        """The agent's process: the oldest there."""
        return min(self.processes(), key=lambda process: process.create_time())

    def listeners(self) -> set[str]:
        """Local addresses of listening TCP sockets, without ports."""
        listed = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "ss", "-Hltn"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return {line.split()[3].rpartition(":")[0] for line in listed.splitlines()}

    def cut(self) -> None:
        """Take its cable out."""
        _ip(f"-n {self.namespace} link set {self.interface} down")

    def wait_until_empty(self, seconds: float) -> list[str]:
        """What still lives after so long."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        said = []
        for process in left:
            with suppress(psutil.NoSuchProcess):
                said.append(" ".join(process.cmdline()))
        return said


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts in one network. Skips the test where this user or system cannot make them."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        words = ", ".join(missing or _TOOLS)
        pytest.skip(f"network namespaces need root and {words} (Debian: iproute2, util-linux)")
    tag = f"ls{os.getpid() % 100000}"
    switch, made = f"{tag}s", []
    try:
        _ip(f"netns add {switch}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for number in range(count):
            host = Host(f"{tag}{number}", _NAMES[number], f"10.78.0.{number + 1}", "wire0")
            port, inside = f"port{number}", f"-n {host.namespace}"
            _ip(f"netns add {host.namespace}")
            made.append(host)
            _know_each_other(host.namespace, count)
            _ip(f"{inside} link add {host.interface} type veth peer name {port} netns {switch}")
            _ip(f"-n {switch} link set {port} master bridge up")
            _ip(f"{inside} addr add {host.address}/24 dev {host.interface}")
            _ip(f"{inside} link set {host.interface} up")
            _ip(f"{inside} link set lo up")
        yield made
    finally:
        for host in made:
            kill(host.processes())
            for started in host.started:
                end(started.process)
            _ip(f"netns del {host.namespace}")
            shutil.rmtree(_ETC / host.namespace, ignore_errors=True)
        _ip(f"netns del {switch}")


def _know_each_other(namespace: str, count: int) -> None:
    lines = [
        "127.0.0.1 localhost",
        *(f"10.78.0.{number + 1} {name}" for number, name in enumerate(_NAMES[:count])),
    ]
    (_ETC / namespace).mkdir(parents=True)
    (_ETC / namespace / "hosts").write_text("\n".join(lines) + "\n")
    (_ETC / namespace / "resolv.conf").write_text("")
