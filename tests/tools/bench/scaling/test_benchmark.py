"""`lockstep.benchmark_scaling`: from turns to rows, what a prediction is made of, and a
measurement on real ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.collectives.network import Link
from lockstep.tools.bench.scaling import benchmark
from lockstep.tools.bench.scaling.prediction import Carried
from lockstep.tools.bench.scaling.timing import Timed
from lockstep.tools.bench.scaling.works import TimedWork
from lockstep.tools.timing.profile import Leaves
from tests.refused import refused
from tests.training import toy

BUCKETS = [Leaves(ready=1.0, elements=1000)]


class Teams:
    """In place of ranks: seconds of a step by (workers, global batch); the link costs nothing."""

    def __init__(self, seconds: dict[tuple[int, int], float]) -> None:
        self.seconds = seconds
        self.works: list[TimedWork] = []
        self.links: int | None = None

    def __call__(self, fn: Any, sizes: list[int], args: tuple[Any, ...]) -> list[Timed]:
        _, _, self.works, steps, rounds, _, self.links = args
        return [self._team(size, steps, rounds) for size in sizes]

    def _team(self, size: int, steps: int, rounds: int) -> Timed:
        turns = {
            number: (
                [(steps * work.global_batch, steps * self.seconds[work.workers, work.global_batch])]
                * rounds
            )
            for number, work in enumerate(self.works)
            if work.workers == size
        }
        link = Link(0.0, float("inf")) if size == self.links else None
        known = Carried(
            buckets=BUCKETS, width=4, buffers=0, reduction="native", overlaps=True, link=link
        )
        return Timed(turns=turns, carried=known)


def measured(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[tuple[int, int], float],
    workers: Any,
    **options: Any,
) -> Any:
    teams = Teams(seconds)
    monkeypatch.setattr(benchmark, "run_teams", teams)
    monkeypatch.setattr(benchmark, "cores", lambda: 4)
    found = lockstep.benchmark_scaling(lambda_free, workers, device="cpu", **options)
    return found, teams


def lambda_free() -> lockstep.Task:
    return toy.task(global_batch=16, micro_batch=4)


SECONDS = {(1, 16): 0.4, (1, 8): 0.2, (1, 4): 0.11, (2, 16): 0.25, (4, 16): 0.2}


def test_rows_follow_from_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    found, teams = measured(monkeypatch, SECONDS, [1, 2, 4], steps=3, rounds=2)
    assert [row.samples_per_s for row in found.rows] == [
        pytest.approx(rate) for rate in (40, 64, 80)
    ]
    assert [row.efficiency for row in found.rows] == [
        pytest.approx(share) for share in (1, 0.8, 0.5)
    ]
    assert [row.step_ms for row in found.rows] == [pytest.approx(ms) for ms in (400, 250, 200)]
    assert [row.threads for row in found.rows] == [4, 2, 1]
    assert teams.links == 2
    assert "2 turns of 3 steps for each row" in found.how
    assert any(each.startswith("ranks had 4 threads with 1 worker") for each in found.remarks)


def test_a_prediction_is_made_of_one_rank_alone_and_never_of_what_it_is_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, _ = measured(monkeypatch, SECONDS, [1, 2, 4])
    assert [row.predicted_efficiency for row in before.rows] == [
        1,
        pytest.approx(1),
        pytest.approx(0.1 / 0.11),
    ]
    after, _ = measured(monkeypatch, SECONDS | {(2, 16): 9.0, (4, 16): 9.0}, [1, 2, 4])
    assert [row.predicted_efficiency for row in after.rows] == [
        row.predicted_efficiency for row in before.rows
    ]
    slower, _ = measured(monkeypatch, SECONDS | {(1, 4): 0.2}, [1, 2, 4])
    assert slower.rows[2].predicted_efficiency == pytest.approx(0.5)


def test_weak_scaling_counts_the_samples_of_the_larger_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, teams = measured(
        monkeypatch,
        {(1, 16): 0.4, (1, 8): 0.3, (2, 16): 0.3, (2, 32): 0.5},
        [1, 2],
        mode="both",
        threads=1,
    )
    assert [(row.mode, row.workers) for row in found.rows] == [
        ("strong", 1),
        ("strong", 2),
        ("weak", 1),
        ("weak", 2),
    ]
    weak = found.rows[3]
    assert (weak.samples_per_s, weak.efficiency) == (pytest.approx(64), pytest.approx(0.8))
    assert weak.predicted_efficiency == 1  # the fullest rank has what the base has
    assert {work.global_batch for work in teams.works if work.workers == 2} == {16, 32}
    assert {work.threads for work in teams.works} == {1}


def test_another_base_and_one_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, SECONDS, [4, 2])
    assert [row.efficiency for row in found.rows] == [1, pytest.approx(1.6)]
    alone, teams = measured(monkeypatch, SECONDS, [1])
    assert (len(alone.rows), teams.links) == (1, None)
    assert any(
        each.startswith("1 worker only: there is nothing to compare with") for each in alone.remarks
    )


def test_exact_mode_has_one_thread_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, SECONDS, [1, 2], exact=True)
    assert [row.threads for row in found.rows] == [1, 1]


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"steps": 0}, "not-a-whole-number", {"name": "steps", "value": 0}),
        ({"rounds": 1.5}, "not-a-whole-number", {"name": "rounds", "value": 1.5}),
        ({"mode": "both of them"}, "unknown-choice", {"name": "mode", "value": "both of them"}),
        ({"threads": 0}, "not-a-whole-number", {"name": "threads", "value": 0}),
        ({"update": "server"}, "server-not-measured", {"update": "server"}),
        ({"device": "tpu"}, "unknown-choice", {"name": "device", "value": "tpu"}),
        ({"exact": True, "compress": "bf16"}, "exact-with-compress", {"compress": "bf16"}),
        (
            {"mode": "weak", "workers": [1, 4]},
            "step-larger-than-data",
            {"workers": 4, "mode": "weak", "global_batch": 64, "samples": 44},
        ),
    ],
)
def test_values_that_cannot_work_are_refused_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    monkeypatch.setattr(benchmark, "run_teams", None)
    with refused(code, **values):
        lockstep.benchmark_scaling(lambda_free, **{"workers": [1, 2]} | options)


@pytest.mark.parametrize(("gpus", "device"), [(2, "auto"), (2, "cuda"), (0, "cuda")])
def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with refused("too-few-gpus", workers=4, gpus=gpus):
        lockstep.benchmark_scaling(lambda_free, [1, 4], device=device)


def test_on_real_ranks() -> None:
    """Nothing here depends on how fast they are."""
    parts = (
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        toy.data(64, 1),
        nn.CrossEntropyLoss(),
    )
    found = lockstep.benchmark_scaling(
        parts, [1, 2], steps=2, rounds=3, micro_batch=8, threads=1, device="cpu"
    )
    assert found.task == "Sequential"
    one, two = found.rows
    assert (one.workers, one.speedup, one.efficiency, one.predicted_efficiency) == (1, 1, 1, 1)
    assert two.speedup == two.samples_per_s / one.samples_per_s
    assert two.efficiency == two.speedup / 2
    assert two.low <= two.samples_per_s <= two.high
    assert two.predicted_efficiency > 0
    assert two.step_ms == pytest.approx(1e3 * 16 / two.samples_per_s)  # the medians of one turn
    assert replace(one, workers=2) != two
