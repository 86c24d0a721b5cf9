"""benchmarks/start.py and benchmarks/recover.py: what they count and compute, on commands that
start no torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path

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


def test_cpu_seconds_include_those_of_orphans_and_a_failure_ends_the_benchmark(
    tmp_path: Path,
) -> None:
    (tmp_path / "command.py").write_text(FORKED_AND_LEFT)
    code = """
import sys, pathlib, start
start.adopt_orphans()  # of this process only
cost, printed = start.measured([sys.executable, "command.py"], pathlib.Path())
print(printed.strip(), cost.cpu >= 0.5, flush=True)
start.measured([sys.executable, "-c", "import sys; sys.exit('no ranks')"], pathlib.Path())
"""
    # a process of its own: it waits for all children
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=str(BENCHMARKS))
    assert (done.stdout, done.returncode) == ("done True\n", 1), done.stderr
    assert "ended with exit code 1:\nno ranks" in done.stderr


def test_ratios_are_of_the_same_round_and_percentiles_are_values_that_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    start, recover = (importlib.import_module(name) for name in ("start", "recover"))
    mine = [start.Cost(2.0, 1.0), start.Cost(9.0, 3.0), start.Cost(4.0, 2.0)]
    peers = [start.Cost(4.0, 4.0), start.Cost(10.0, 6.0), start.Cost(4.0, 8.0)]
    assert start.ratios(mine, peers) == (0.9, 0.25)
    assert start.lower_quarter([3.0, 1.0, 2.0, 5.0, 4.0]) == 2.0
    assert start.lower_quarter([3.0]) == 3.0

    values = [float(value) for value in range(1, 21)]
    shares = {0.0: 1.0, 0.5: 10.0, 0.95: 19.0, 1.0: 20.0}
    assert {share: recover.percentile(values, share) for share in shares} == shares


def test_the_growth_of_a_cost_with_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    many_ranks = importlib.import_module("many_ranks")
    sizes = [8, 16, 32, 64]
    for constant, factor, exponent in [(3.0, 0.5, 1.0), (0.0, 0.01, 2.0), (2.0, 0.001, 1.5)]:
        values = [constant + factor * size**exponent for size in sizes]
        curve = many_ranks.growth(sizes, values)
        assert curve.exponent == exponent
        assert curve.constant == pytest.approx(constant, abs=1e-6)
        assert curve.factor == pytest.approx(factor)
    assert many_ranks.growth(sizes, [5.0, 5.1, 5.2, 5.1]) == many_ranks.Growth(5.1, 0.0, 0.0)
    assert many_ranks.growth([8, 16], [1.0, 4.0]).factor == 0.0, "two points are no curve"

    rounds = {16: [{"end": 6.0}], 8: [{"end": 3.0}, {"end": 4.0}, {"end": 9.0}]}
    head, line = many_ranks.table({"s": many_ranks.medians(rounds, "end")}).splitlines()
    assert head.split() == ["N", "8", "16", "a", "+", "c", "N^p"]
    assert line.split() == ["s", "4.00", "6.00", "5"]
