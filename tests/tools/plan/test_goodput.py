"""Goodput: without failures, at the interval that is best, and against trainings that are thrown
down at random.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.errors import UsageError
from lockstep.tools.plan.goodput import Failures, goodput, share_of_work

DAY = Failures(mtbf=24 * 3600.0, checkpoint=20.0, restart=60.0)


def test_hardly_any_failure_costs_hardly_any_time() -> None:
    found = goodput(Failures(mtbf=1e12, checkpoint=1.0, restart=0.0), 1)
    assert found.share == pytest.approx(1, abs=1e-5)
    assert found.interval == pytest.approx(math.sqrt(2 * 1e12), rel=1e-3)  # Young's


def test_checkpoints_alone() -> None:
    assert share_of_work(
        Failures(mtbf=1e15, checkpoint=10.0, restart=0.0), 1, 90.0
    ) == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize("workers", [1, 16, 512])
def test_no_other_interval_is_better(workers: int) -> None:
    best = goodput(DAY, workers)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert share_of_work(DAY, workers, factor * best.interval) <= best.share + 1e-4


def test_more_ranks_fail_more_often_and_save_more_often() -> None:
    found = [goodput(DAY, workers) for workers in (1, 16, 256, 4096)]
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)
    assert [each.interval for each in found] == sorted(
        (each.interval for each in found), reverse=True
    )
    assert goodput(DAY, 2**20).share == 0.0  # a failure every 80 ms: nothing is ever saved


def test_a_training_that_is_thrown_down_at_random() -> None:
    rng = np.random.default_rng(0)
    mtbf, interval, segments = DAY.mtbf / 64, 600.0, 4000
    clock = 0.0
    for _ in range(segments):
        while (fails := rng.exponential(mtbf)) < interval + DAY.checkpoint:
            clock += fails
            while (again := rng.exponential(mtbf)) < DAY.restart:
                clock += again
            clock += DAY.restart
        clock += interval + DAY.checkpoint
    assert share_of_work(DAY, 64, interval) == pytest.approx(segments * interval / clock, rel=0.02)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mtbf": 0.0}, "--mtbf 0: give the hours"),
        ({"mtbf": math.nan}, "--mtbf nan"),
        ({"checkpoint": 0.0}, "--checkpoint-cost 0: give the seconds"),
        ({"restart": -1.0}, "--restart -1: give the seconds"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Failures(**{"mtbf": 1.0, "checkpoint": 1.0, "restart": 1.0, **given})
