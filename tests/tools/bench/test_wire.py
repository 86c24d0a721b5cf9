"""benchmarks/wire.py: what a host sends arrives at its receiver, unchanged and late."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.rest

DELAY = 0.005  # seconds

SERVER = """
import socket
caller, _ = socket.create_server(("", 5000)).accept()
while part := caller.recv(2**16):
    caller.sendall(part)
"""
CLIENT = """
import os, socket, sys, time
for _ in range(500):
    try:
        there = socket.create_connection((sys.argv[1], 5000))
        break
    except OSError:
        time.sleep(0.02)
data, back, fastest = os.urandom(2**20), b"", float("inf")
for _ in range(5):
    begin = time.perf_counter()
    there.sendall(b"?")
    assert there.recv(1) == b"?"
    fastest = min(fastest, time.perf_counter() - begin)
for start in range(0, len(data), 2**15):
    there.sendall(data[start : start + 2**15])
    while len(back) < start + 2**15:
        back += there.recv(2**16)
assert back == data
print(fastest)
"""


@pytest.fixture
def namespaces(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("namespaces")
    if reason := module.why_not():
        pytest.skip(reason)
    return module


def test_packets_arrive_unchanged_after_the_delay(namespaces: ModuleType) -> None:
    with namespaces.hosts(3, "1gbit", DELAY) as (_, server, client):
        inside = ["ip", "netns", "exec"]
        serving = subprocess.Popen([*inside, server.namespace, sys.executable, "-I", "-c", SERVER])
        done = subprocess.run(
            [*inside, client.namespace, sys.executable, "-I", "-c", CLIENT, server.address],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert serving.wait() == 0
    assert float(done.stdout) >= 2 * DELAY
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert server.namespace not in left.stdout
