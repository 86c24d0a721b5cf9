"""Being asked to stop, on a rank's side and on a loader worker's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.runtime import preemption
from lockstep.runtime.failure_record import DIRECTORY
from tests.ending import alive, end


def test_a_rank_notes_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    restore = preemption.listen()
    try:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-3.heeds"]
        preemption.listen()()  # a world within, which closes
        assert (tmp_path / "rank-3.heeds").exists()
        assert not preemption.asked
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert preemption.asked
        assert sorted(path.name for path in tmp_path.iterdir()) == ["asked", "rank-3.heeds"]
    finally:
        restore()
    assert not (tmp_path / "rank-3.heeds").exists()
    assert not preemption.asked
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before


CHILD = """
import os, sys, time
from lockstep.runtime.process_lifetime import heed_parent_only
heed_parent_only()
print("here", flush=True)
time.sleep(60)
"""
PARENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
child.terminate()
print(child.wait(), flush=True)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a process cannot tell who sent a signal"
)
def test_a_loader_worker_dies_of_its_parents_signal_and_of_nobody_elses() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        child = int(process.stdout.readline())
        os.kill(child, signal.SIGTERM)
        os.kill(child, signal.SIGUSR1)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert alive(child)
            time.sleep(0.02)
        process.stdin.write("now\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{128 + signal.SIGTERM}\n"
    finally:
        end(process)
