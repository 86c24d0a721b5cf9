"""Collectives measured: every algorithm gives what it must, and a wrong element is counted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lockstep
from lockstep import collectives
from lockstep.collectives.algorithms import algorithms_of
from lockstep.collectives.schedule import Kind
from lockstep.testing import run_ranks
from lockstep.tools.bench import collectives as measured
from lockstep.tools.bench.collectives import KINDS, CollectiveTime, bus_factor
from lockstep.world.world import World
from tests.refused import refused


def one(**changed: Any) -> CollectiveTime:
    return CollectiveTime(
        **{
            "collective": "all_reduce",
            "algorithm": "ring",
            "size": 4000,
            "workers": 4,
            "runs": 9,
            "p50": 2e-6,
            "p99": 4e-6,
            "wrong": 0,
            **changed,
        }
    )


# -- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.5),
        ("broadcast", 1),
        ("reduce", 1),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(collective: str, factor: float) -> None:
    assert bus_factor(collective, 4) == factor
    found = one(collective=collective)
    assert math.isclose(found.algbw, 2.0)  # 4000 bytes in 2 us
    assert math.isclose(found.busbw, 2.0 * factor)
    assert found.as_json() == {
        "collective": collective,
        "algorithm": "ring",
        "size": 4000,
        "workers": 4,
        "runs": 9,
        "p50": 2e-6,
        "p99": 4e-6,
        "wrong": 0,
        "algbw": found.algbw,
        "busbw": found.busbw,
    }


def test_a_table_has_a_line_each_and_compares_with_the_backend_at_the_same_size() -> None:
    rows = [
        one(algorithm="native", p50=4e-6),
        one(p50=2e-6, wrong=3),
        one(size=8000, algorithm="native", p50=5e-6),
        one(size=8000, p50=10e-6),
        one(collective="broadcast"),
    ]
    lines = measured.table(rows).splitlines()
    assert lines[0].split() == [
        "collective",
        "algorithm",
        "size",
        "time",
        "p99",
        "algbw",
        "busbw",
        "#wrong",
        "vs",
        "native",
    ]
    assert lines[1].split() == ["(B)", "(us)", "(us)", "(GB/s)", "(GB/s)"]
    assert [line.split() for line in lines[2:]] == [
        ["all_reduce", "native", "4000", "4.0", "4.0", "1.00", "1.50", "0", "1.00x"],
        ["all_reduce", "ring", "4000", "2.0", "4.0", "2.00", "3.00", "3", "2.00x"],
        ["all_reduce", "native", "8000", "5.0", "4.0", "1.60", "2.40", "0", "1.00x"],
        ["all_reduce", "ring", "8000", "10.0", "4.0", "0.80", "1.20", "0", "0.50x"],
        ["broadcast", "ring", "4000", "2.0", "4.0", "2.00", "2.00", "0"],
    ]
    assert len({len(line) for line in (lines[0], *lines[2:6])}) == 1


# -- what is timed -------------------------------------------------------------------------------


def everything(world: World) -> list[CollectiveTime]:
    """Every algorithm of every collective: of one element, of fewer than ranks, of a number that
    ranks do not divide.
    """
    return [
        each
        for kind in KINDS
        for size in (1, 8, 4 * 101)
        for each in measured._one_size(world, kind, size, ["native", *algorithms_of(kind)], 3)
    ]


@pytest.mark.parametrize("workers", [2, 3])
def test_every_algorithm_gives_what_it_must(workers: int) -> None:
    ranks = run_ranks(everything, workers)
    assert all(rank == ranks[0] for rank in ranks)
    assert {(each.collective, each.algorithm) for each in ranks[0]} >= {
        (kind, name) for kind in KINDS for name in ("native", *algorithms_of(kind))
    }
    for each in ranks[0]:
        assert (each.wrong, each.runs, each.workers) == (0, 3, workers), each
        assert 0 < each.p50 <= each.p99


@pytest.fixture
def world() -> Iterator[World]:
    with lockstep.init(backend="gloo") as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_elements_are_counted_over_all_runs(
    world: World, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(collectives, kind)

    def off_by_one(tensor: Any, **options: Any) -> Any:
        found = right(tensor, **options)
        (found[0] if isinstance(found, list) else found)[:2] += 1
        return found

    (fine,) = measured._one_size(world, kind, 40, ["native"], 5)
    monkeypatch.setattr(collectives, kind, off_by_one)
    (bad,) = measured._one_size(world, kind, 40, ["native"], 5)
    assert (fine.wrong, bad.wrong) == (0, 2 * 5)


def test_times_are_the_slowest_ranks_median_and_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([100.0, 100.0, 5.0, 1.0, 4.0, 2.0, 3.0])  # two warm up

    monkeypatch.setattr(measured._Case, "run", lambda case, algorithm, run: (next(seconds), 0))
    (found,) = measured._one_size(world, "all_reduce", 40, ["native"], 5)
    assert (found.p50, found.p99, found.runs) == (3.0, 5.0, 5)


def test_algorithms_take_turns_and_each_run_has_numbers_of_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, list[float]]] = []
    right = collectives.all_reduce

    def noting(tensor: torch.Tensor, algorithm: str) -> Any:
        given.append((algorithm, tensor.tolist()))
        return right(tensor, algorithm=algorithm)  # type: ignore[arg-type]

    monkeypatch.setattr(collectives, "all_reduce", noting)
    measured._one_size(world, "all_reduce", 8, ["native", "ring"], 2)
    assert [name for name, _ in given] == [
        "ring",
        "native",
        "native",
        "ring",
        "ring",
        "native",
        "native",
        "ring",
    ]
    assert given[4][1] == given[5][1] != given[6][1]


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "algorithms", "runs", "code", "values"),
    [
        (
            "all_redcue",
            ["native"],
            None,
            "unknown-choice",
            {"name": "collective", "value": "all_redcue", "choices": list(KINDS)},
        ),
        (
            "broadcast",
            ["native", "recursive_doubling"],
            None,
            "unknown-choice",
            {
                "name": "algorithm",
                "value": "recursive_doubling",
                "choices": ["native", "auto", "shared_memory", *algorithms_of("broadcast")],
            },
        ),
        ("all_reduce", ["native"], 0, "wrong-value", {"name": "runs", "value": 0}),
        ("all_reduce", ["native"], -1, "wrong-value", {"name": "runs", "value": -1}),
    ],
)
def test_what_there_is_not_is_refused_before_ranks_start(
    kind: Any,
    algorithms: list[str],
    runs: int | None,
    code: str,
    values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, "launch", None)
    with refused(code, **values):
        measured.measure(kind, 2, [4], algorithms, runs)
