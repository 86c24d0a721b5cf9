"""Collectives measured: every algorithm gives what it must, and a wrong element is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

import lockstep
from lockstep import collectives
from lockstep.schedules.algorithms import algorithms_of
from lockstep.tools.bench import collectives as measured
from lockstep.tools.bench.collectives import KINDS, CollectiveTime, bus_factor
from lockstep.world.world import World
from tests.teams import on_team

RING = CollectiveTime(
    collective="all_reduce",
    algorithm="ring",
    size=4000,
    workers=4,
    runs=9,
    p50=2e-6,
    p99=4e-6,
    wrong=0,
)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    factors = {"all_reduce": 1.5, "broadcast": 1, "reduce": 1}
    factors |= dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 0.75)
    for collective, factor in factors.items():
        row = replace(RING, collective=collective)
        assert bus_factor(collective, 4) == factor
        assert row.algbw == pytest.approx(2.0)  # 4000 bytes in 2 us
        assert row.busbw == pytest.approx(2.0 * factor)
        assert row.as_json() == {**asdict(row), "algbw": row.algbw, "busbw": row.busbw}


def test_a_table_compares_with_the_backend_at_the_same_size() -> None:
    rows = [
        replace(RING, algorithm="native", p50=4e-6),
        replace(RING, wrong=3),
        replace(RING, size=8000, algorithm="native", p50=5e-6),
        replace(RING, size=8000, p50=10e-6),
        replace(RING, collective="broadcast"),
    ]
    lines = [line.split() for line in measured.table(rows).splitlines()[2:]]
    assert " ".join(lines[1]) == "all_reduce ring 4000 2.0 4.0 2.00 3.00 3 2.00x"
    assert [line[8:] for line in lines] == [["1.00x"], ["2.00x"], ["1.00x"], ["0.50x"], []]


def everything(world: World) -> list[CollectiveTime]:
    """Every algorithm of every collective: of one element, of fewer than ranks, of a number that
    ranks do not divide.
    """
    rows: list[CollectiveTime] = []
    for kind in KINDS:
        for size in (1, 8, 4 * 101):
            rows += measured._one_size(world, kind, size, ["native", *algorithms_of(kind)], 3)
    return rows


@pytest.mark.parametrize("workers", [3, pytest.param(2, marks=pytest.mark.rest)])
def test_every_algorithm_gives_what_it_must(workers: int) -> None:
    ranks = on_team(everything, workers)
    assert all(rank == ranks[0] for rank in ranks)
    assert {(row.collective, row.algorithm) for row in ranks[0]} >= {
        (kind, name) for kind in KINDS for name in ("native", *algorithms_of(kind))
    }
    for row in ranks[0]:
        assert (row.wrong, row.runs, row.workers) == (0, 3, workers), row
        assert 0 < row.p50 <= row.p99


@pytest.fixture
def world() -> Iterator[World]:
    with lockstep.init(backend="gloo") as made:
        yield made


def test_wrong_elements_are_counted_over_all_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in KINDS:
        right = getattr(collectives, kind)

        def off_by_one(tensor: Any, right: Any = right, **options: Any) -> Any:
            result = right(tensor, **options)
            (result[0] if isinstance(result, list) else result)[:2] += 1
            return result

        (fine,) = measured._one_size(world, kind, 40, ["native"], 5)
        with monkeypatch.context() as patch:
            patch.setattr(collectives, kind, off_by_one)
            (bad,) = measured._one_size(world, kind, 40, ["native"], 5)
        assert (fine.wrong, bad.wrong) == (0, 2 * 5), kind


def test_times_are_the_slowest_ranks_median_and_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"native": [5.0, 1.0, 4.0, 2.0, 3.0]}
    monkeypatch.setattr(measured, "take_turns", lambda *arguments, **options: seconds)
    (row,) = measured._one_size(world, "all_reduce", 40, ["native"], 5)
    assert (row.p50, row.p99, row.runs) == (3.0, 5.0, 5)
