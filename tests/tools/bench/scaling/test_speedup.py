"""Rates, speedups and efficiencies from turns, with any base."""

from __future__ import annotations

import json

import pytest

from lockstep.tools.bench.scaling.speedup import Scaling, ScalingRow, efficiency, rows


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
