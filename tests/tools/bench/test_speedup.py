"""Rates, speedups and efficiencies from turns, with any base.

Each remark is there where it belongs, and only there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.tools.bench.speedup import Scaling, ScalingRow, Turn, efficiency, remarks, rows


def turns(*rates: float, seconds: float = 2.0, threads: int = 1) -> list[Turn]:
    return [
        Turn(samples=round(rate * seconds), seconds=seconds, threads=threads, reduction="native")
        for rate in rates
    ]


def found(**taken: list[Turn]) -> list[ScalingRow]:
    return rows({int(name.removeprefix("w")): given for name, given in taken.items()}, steps=10)


def test_the_first_is_the_base_and_efficiency_is_the_share_of_the_ideal() -> None:
    assert efficiency(100 / 28, 4, 1) == pytest.approx(0.893, abs=5e-4)
    one, two, four = found(
        w1=turns(100, 100, threads=8), w2=turns(180, 180), w4=turns(200, 200, threads=2)
    )
    assert (one.speedup, one.efficiency) == (1, 1)
    assert (two.speedup, two.efficiency) == pytest.approx((1.8, 0.9))
    assert (four.speedup, four.efficiency) == (2, 0.5)
    assert (one.threads, four.threads) == (8, 2)


def test_any_number_may_be_the_base() -> None:
    four, eight, one = found(w4=turns(300), w8=turns(450), w1=turns(100))
    assert (four.speedup, four.efficiency) == (1, 1)
    assert (eight.speedup, eight.efficiency) == (1.5, 0.75)  # twice the workers
    assert one.speedup == pytest.approx(1 / 3)
    assert one.efficiency == pytest.approx(4 / 3)  # superlinear values stay as they are


def test_rates_are_medians_and_quartiles_of_the_turns() -> None:
    (row,) = found(w1=turns(10, 50, 20, 40, 30))
    assert (row.low, row.samples_per_s, row.high) == (20, 30, 40)
    assert row.step_ms == 200  # ten steps in two seconds
    (once,) = found(w1=turns(7))
    assert once.low == once.samples_per_s == once.high == 7


SCALING = Scaling(
    task="toy",
    rows=found(w1=turns(100, threads=2), w2=turns(150)),
    mode="strong",
    constant="the batch stays",
    where="a machine",
    how="in a way",
    remarks=["believe"],
    cores=1,
    device="cpu",
)


def test_table_and_picture(tmp_path: Path) -> None:
    row = ["2", "1", "200.00", "150", "150", "150", "1.50", "75.0", "%"]
    assert row in [line.split() for line in SCALING.describe().splitlines()]
    SCALING.plot(tmp_path / "scaling.svg")
    drawn = (tmp_path / "scaling.svg").read_text()
    for words in ("ideal", "strong scaling, measured", "more ranks than the 1 core"):
        assert f">{words}</text>" in drawn


def remarked(*given: list[Turn], cores: int | None = 4) -> list[str]:
    """The remarks of 1, 2, 4 ... workers."""
    numbered = {2**power: taken for power, taken in enumerate(given)}
    return remarks(rows(numbered, steps=10), cores=cores)


def test_a_remark_is_there_where_it_belongs() -> None:
    assert remarked(turns(100), turns(190), turns(350)) == []  # a fair comparison
    (crowded,) = remarked(turns(100), turns(190), turns(200), cores=2)
    assert crowded.startswith("4 workers with 1 thread each on 2 cores")
    (uneven,) = remarked(turns(100, threads=4), turns(120, threads=2), turns(130))
    assert "--threads 1" in uneven
    for unknown in (turns(190), turns(200, threads=4)):
        assert remarked(turns(100), unknown, turns(200), cores=None) == []
    (superlinear,) = remarked(turns(100), turns(250))
    assert "2 workers: efficiency 125 %" in superlinear
    # fewer workers than the base are above it as a rule
    assert remarks(rows({4: turns(100), 1: turns(40)}, steps=10), cores=4) == []
