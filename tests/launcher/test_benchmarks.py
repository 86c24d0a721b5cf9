"""benchmarks/start.py and benchmarks/recover.py: what they count and compute, on commands that
start no torch.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.commands import python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

FORKED_AND_LEFT = """
import os, time
if os.fork() == 0:
    while time.process_time() < 0.5:
        pass
    os._exit(0)
print("done", flush=True)
os._exit(0)  # before its child
"""

RESTARTS_RANKS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import recover

def rank():
    recover.note("model built")
    while os.getppid() == launcher:
        recover.note("step ended")
        time.sleep(0.01)
    os._exit(0)

launcher = os.getpid()
while True:
    ranks = [pid for pid in (os.fork() or rank() for _ in range(2))]
    dead, _ = os.wait()
    print(f"rank {ranks.index(dead)} (pid {dead}, here) was killed", file=sys.stderr, flush=True)
    (other,) = {*ranks} - {dead}
    os.kill(other, 9)
    os.wait()
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("start")


@pytest.fixture
def recover(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("recover")


def test_cpu_seconds_include_those_of_orphans(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(FORKED_AND_LEFT)
    code = """
import sys, pathlib, start
start.adopt_orphans()  # of this process only
cost, printed = start.measured([sys.executable, "command.py"], pathlib.Path())
print(printed.strip(), cost.cpu >= 0.5)
"""
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=str(BENCHMARKS))
    assert done.stdout == "done True\n", done.stderr


def test_a_command_that_fails_ends_the_benchmark_with_what_it_said(tmp_path: Path) -> None:
    fails = "import sys; print('no ranks', file=sys.stderr); sys.exit(3)"
    code = f"""
import sys, pathlib, start
start.measured([sys.executable, "-c", {fails!r}], pathlib.Path())
"""
    # a process of its own: it waits for all children
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=str(BENCHMARKS))
    assert done.returncode == 1
    assert "ended with exit code 3:\nno ranks" in done.stderr


def test_ratios_are_of_the_same_round(start: Any) -> None:
    mine = [start.Cost(2.0, 1.0), start.Cost(9.0, 3.0), start.Cost(4.0, 2.0)]
    peers = [start.Cost(4.0, 4.0), start.Cost(10.0, 6.0), start.Cost(4.0, 8.0)]
    assert start.ratios(mine, peers) == (0.9, 0.25)
    assert start.lower_quarter([3.0, 1.0, 2.0, 5.0, 4.0]) == 2.0
    assert start.lower_quarter([3.0]) == 3.0


def test_proportional_set_sizes_add_up(start: Any) -> None:
    one, two = start.pss([os.getpid()]), start.pss([os.getpid(), os.getpid()])
    assert 0 < one.anonymous <= one.total
    assert two.total == pytest.approx(2 * one.total, rel=0.05)


def test_a_kill_and_the_generation_after_it(recover: Any, tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(RESTARTS_RANKS)
    command = recover.Command([sys.executable, "launcher.py", str(BENCHMARKS)], tmp_path, workers=2)
    try:
        first = command.first_step(())
        times, second = recover.kill_one(command, first, random.Random(0), (0.0, 0.0))
    finally:
        command.end()
    assert {*first.pids} & {*second.pids} == set()
    # which these ranks do not note
    assert [*times] == [event for event in recover.EVENTS if event != "imports done"]
    assert 0 < times["model built"] < times["step ended"]
    assert times["ranks ended"] > 0
    assert times["launcher's line"] > 0


def test_percentiles_are_values_that_were_measured(recover: Any) -> None:
    values = [float(value) for value in range(1, 21)]
    assert [recover.percentile(values, share) for share in (0.0, 0.5, 0.95, 1.0)] == [
        1.0,
        10.0,
        19.0,
        20.0,
    ]
