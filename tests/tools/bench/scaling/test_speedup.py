"""Rates, speedups and efficiencies from turns, with any base.

Each remark is there where it belongs, and only there.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.tools.bench.scaling.speedup import Scaling, ScalingRow, efficiency, remarks, rows


def turns(*rates: float, seconds: float = 2.0) -> list[tuple[int, float]]:
    return [(round(rate * seconds), seconds) for rate in rates]


def found(**taken: list[tuple[int, float]]) -> list[ScalingRow]:
    by_workers = {int(name.removeprefix("w")): each for name, each in taken.items()}
    predicted = {workers: 100.0 * workers**0.5 for workers in by_workers}
    return rows(
        "strong", by_workers, predicted, {workers: 8 // workers for workers in by_workers}, steps=10
    )


def test_the_first_is_the_base_and_efficiency_is_the_share_of_the_ideal() -> None:
    one, two, four = found(w1=turns(100, 100), w2=turns(180, 180), w4=turns(200, 200))
    assert (one.speedup, one.efficiency) == (1, 1)
    assert (two.speedup, two.efficiency) == (pytest.approx(1.8), pytest.approx(0.9))
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


def test_predictions_are_compared_with_the_predicted_base() -> None:
    two, eight = found(w2=turns(1), w8=turns(1000))
    assert (two.predicted_efficiency, eight.predicted_efficiency) == (1, pytest.approx(0.5))


def test_seeds_example() -> None:
    """100 seconds with one, 28 with four: 3.57 times as fast, and 89.3 per cent."""
    assert efficiency(100 / 28, 4, 1) == pytest.approx(0.893, abs=5e-4)


def test_json_is_plain() -> None:
    each = found(w1=turns(100), w2=turns(150))
    scaling = Scaling(
        task="t",
        rows=each,
        modes={"strong": "x"},
        where="w",
        how="h",
        remarks=["r"],
        cores=2,
        device="cpu",
    )
    plain = json.loads(json.dumps(scaling.as_json()))
    assert list(plain["rows"][1]) == [
        *(
            "mode",
            "workers",
            "samples_per_s",
            "low",
            "high",
            "speedup",
            "efficiency",
            "predicted_efficiency",
            "threads",
            "step_ms",
        )
    ]
    assert (plain["rows"][1]["workers"], plain["rows"][1]["efficiency"], plain["remarks"]) == (
        2,
        0.75,
        ["r"],
    )


def row(workers: int, speedup: float, **changes: Any) -> ScalingRow:
    fields: dict[str, Any] = {
        "mode": "strong",
        "workers": workers,
        "samples_per_s": 100 * speedup,
        "low": 99 * speedup,
        "high": 101 * speedup,
        "speedup": speedup,
        "efficiency": speedup / workers,
        "predicted_efficiency": 1.0,
        "threads": 1,
        "step_ms": 10.0,
    }
    return ScalingRow(**fields | changes)


def test_a_fair_comparison_needs_no_remark() -> None:
    assert remarks([row(1, 1), row(2, 1.9), row(4, 3.5)], cores=4, device="cpu") == []


def test_one_number_compares_with_nothing() -> None:
    (said,) = remarks([row(2, 1, efficiency=1.0)], cores=4, device="cpu")
    assert said.startswith("2 workers only: there is nothing to compare with")


def test_more_ranks_than_cores() -> None:
    (said,) = remarks([row(1, 1), row(2, 1.9), row(4, 2.0), row(8, 2.0)], cores=2, device="cpu")
    assert said.startswith("4 and 8 workers on 2 cores: ranks wait for a core that another one has")
    assert remarks([row(1, 1), row(8, 6.0)], cores=8, device="cpu") == []


def test_more_threads_than_cores() -> None:
    said = remarks(
        [row(1, 1, threads=4), row(2, 1.5, threads=4), row(4, 2, threads=4)], cores=4, device="cpu"
    )
    assert len(said) == 1
    assert "2 and 4 workers with 4 threads each are more than the 4 cores" in said[0]
    assert said[0].endswith("--threads 1 fits")


def test_other_numbers_of_threads() -> None:
    (said,) = remarks(
        [row(1, 1, threads=4), row(2, 1.2, threads=2), row(4, 1.3)], cores=4, device="cpu"
    )
    assert said.startswith("ranks had 4 threads with 1 worker, and other numbers with 2 and 4")
    assert "--threads 1" in said


def test_on_gpus_neither_cores_nor_threads_matter() -> None:
    assert remarks([row(1, 1, threads=4), row(8, 7.5)], cores=8, device="cuda") == []


def test_above_the_ideal_by_more_than_noise() -> None:
    (said,) = remarks([row(1, 1), row(2, 2.5)], cores=4, device="cpu")
    assert said.startswith(
        "strong, 2 workers: efficiency 125 % is above the ideal, shown as measured; smaller shares"
    )


def test_above_the_ideal_within_noise() -> None:
    wide = row(2, 2.1, low=150.0)
    (said,) = remarks([row(1, 1), wide], cores=4, device="cpu")
    assert said.endswith("the quartiles reach below it: noise would explain it")
    (of_base,) = remarks([row(1, 1, high=120.0), row(2, 2.1)], cores=4, device="cpu")
    assert of_base.endswith("noise would explain it")
    # another mode's base says nothing of this one
    other = [row(1, 1, mode="weak", high=140.0), row(1, 1), row(2, 2.5)]
    assert "smaller shares" in remarks(other, cores=4, device="cpu")[0]


def test_fewer_workers_than_the_base_are_above_it_as_a_rule() -> None:
    assert (
        remarks([row(4, 1, efficiency=1.0), row(1, 0.4, efficiency=1.6)], cores=4, device="cpu")
        == []
    )


def test_a_busy_host_is_named_first() -> None:
    said = remarks([row(1, 1), row(2, 1.9)], cores=2, device="cpu", busy="load 6.0 on 2 cores")
    assert "load 6.0 on 2 cores" in said[0]


def test_what_is_far_above_the_ideal_is_no_matter_of_caches() -> None:
    (said,) = remarks([row(1, 1), row(2, 30.0)], cores=2, device="cpu")
    assert "efficiency 1500 %" in said
    assert "--threads 1" in said
