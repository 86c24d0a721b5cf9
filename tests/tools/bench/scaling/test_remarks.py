"""Each remark is there where it belongs, and only there."""

from __future__ import annotations

from typing import Any

from lockstep.tools.bench.scaling.speedup import ScalingRow, remarks


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
    assert "2 and 4 workers with 4 threads each are more threads than the 4 cores" in said[0]
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
