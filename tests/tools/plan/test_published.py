"""What the plan foretells of published trainings: within 10 points of efficiency, by constants
of devices, families and links alone.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published")


@pytest.mark.parametrize("case", range(5))
def test_within_ten_points(bench: Any, case: int) -> None:
    one = bench.CASES[case]
    assert abs(bench.efficiency(one) - one.efficiency) < 0.10


def test_vgg_scales_worst(bench: Any) -> None:
    found = {case.model: bench.efficiency(case) for case in bench.CASES}
    assert min(found, key=found.__getitem__) == "vgg16"


def test_every_constant_moves_the_way_that_it_should(bench: Any) -> None:
    vgg = next(case for case in bench.CASES if case.model == "vgg16")
    now = bench.efficiency(vgg)
    more = {name: bench.efficiency(vgg, change) for name, change in bench.changes(1.2).items()}
    better = {name for name, value in more.items() if value > now}
    assert better == {"backward / forward", "bandwidth between", "bandwidth within"}
    assert all(value != now for value in more.values())
    assert all(
        bench.efficiency(vgg, change) == pytest.approx(now)
        for change in bench.changes(1.0).values()
    )


def test_the_table_has_a_column_for_each_case_and_shows_the_errors(bench: Any) -> None:
    lines = bench.table(bench.CASES).splitlines()
    assert len(lines) == 5 + len(bench.changes(1.0))
    assert all(case.name in lines[0] for case in bench.CASES)
    assert lines[2].split()[1::2] == ["90.0", "90.0", "68.0", "90.0", "97.7"]
    assert lines[4].startswith("error, points")


def test_published_efficiencies_are_in_no_constant() -> None:
    """They stand in tests and docs only: not a word of them in what the plan computes with."""
    for file in (SOURCE / "lockstep" / "tools" / "plan").rglob("*.py"):
        text = file.read_text()
        assert not [
            word for word in ("97.7", "scaling efficiency", "efficiency=0.") if word in text
        ], file
