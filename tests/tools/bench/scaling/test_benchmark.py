"""`lockstep.benchmark_scaling`: from turns to rows, what a prediction is made of, and a
measurement on real ranks.

What `benchmark_scaling` takes for a task, and what it says of anything else.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.collectives.network import Link
from lockstep.config.task import Task
from lockstep.errors import TaskError
from lockstep.tools.bench.scaling import benchmark
from lockstep.tools.bench.scaling.benchmark import Source, made, source_of
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


NOTHING = {"global_batch": None, "micro_batch": None, "optimizer": None}
DATA = TensorDataset(torch.randn(200, 4), torch.randint(0, 2, (200,)))


def net() -> nn.Module:
    return nn.Linear(4, 2)


def a_sample_each(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def source(
    given: Any, workers: Any = (1, 2), growth: float = 1.0, overrides: Any = None, **parts: Any
) -> Source:
    return source_of(given, workers, growth, overrides, NOTHING | parts)


def sent(given: Source) -> Task:
    """As a rank gets it."""
    return made(pickle.loads(pickle.dumps(given)))


def test_names_files_functions_and_tasks(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(
        "from tests.training import toy\n\ndef task(global_batch: int = 8):\n    return"
        " toy.task(global_batch=global_batch)\n"
    )
    assert source(file, overrides={"global_batch": "16"})().global_batch == 16
    assert sent(source(str(file))).global_batch == 8
    assert sent(source(toy.task)).name == "toy"
    assert sent(source(replace(toy.task(), global_batch=12))).global_batch == 12


@pytest.mark.parametrize("model", [net(), net])
def test_a_model_a_data_set_and_a_loss_become_a_task(model: Any) -> None:
    task = sent(source((model, DATA, nn.CrossEntropyLoss())))
    first, second = task.model(), task.model()
    assert first is not second
    if isinstance(model, nn.Module):
        assert all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(first.parameters(), model.parameters(), strict=True)
        )
    batch = DATA[:10]
    total, weight = task.loss(first(batch[0]), batch)
    assert weight == 10
    torch.testing.assert_close(total, F.cross_entropy(first(batch[0]), batch[1], reduction="sum"))


def test_a_loss_may_have_an_element_a_sample() -> None:
    task = source((net, DATA, a_sample_each))()
    output, batch = torch.randn(200, 2), DATA[:]
    torch.testing.assert_close(
        task.loss(output, batch)[0], F.cross_entropy(output, batch[1], reduction="sum")
    )


@pytest.mark.parametrize(
    ("workers", "growth", "parts", "expected"),
    [
        ((1, 2), 1.0, {}, (64, 32)),
        ((1, 8), 1.0, {}, (200, 25)),  # 200 samples among 8
        ((1, 2, 4), 4.0, {}, (48, 12)),  # 192 samples at four workers
        ((1, 2), 1.0, {"global_batch": 10}, (10, 5)),
        ((1, 4), 1.0, {"micro_batch": 3}, (12, 3)),
        ((1, 500), 1.0, {}, (500, 1)),  # more than there are: refused by who checks the sizes
    ],
)
def test_batches_are_one_micro_batch_for_each_of_the_most_workers(
    workers: Any, growth: float, parts: Any, expected: Any
) -> None:
    task = source((net, DATA, nn.CrossEntropyLoss()), workers, growth, **parts)()
    assert (task.global_batch, task.micro_batch) == expected


def test_the_optimizer_may_be_given() -> None:
    task = source((net, DATA, nn.CrossEntropyLoss()), optimizer=toy.sgd)()
    assert task.optimizer(net()).param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("given", "code", "values"),
    [
        ((net, DATA), "not-model-dataset-loss", {"given": "a tuple of 2"}),
        ((3, DATA, nn.MSELoss()), "not-model-dataset-loss", {"given": "(int, ..., MSELoss)"}),
        ((net, DATA, None), "not-model-dataset-loss", {"given": "(function, ..., NoneType)"}),
        ((net, iter([]), nn.MSELoss()), "dataset-not-map-style", {"kind": "list_iterator"}),
        (nn.Linear(1, 1), "not-a-task-source", {"kind": "Linear"}),
        (3, "not-a-task-source", {"kind": "int"}),
        ((lambda: net(), DATA, nn.MSELoss()), "task-not-portable", {}),
    ],
)
def test_what_is_no_task_is_refused(given: Any, code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        source(given)


def test_options_of_another_kind_of_task_are_refused() -> None:
    with refused("not-for-a-task", name="global_batch", value=8):
        source("digits", global_batch=8)
    with refused("overrides-without-file", overrides={"lr": "1"}):
        source(toy.task, overrides={"lr": "1"})


def test_a_function_that_returns_something_else() -> None:
    with refused("function-without-task", TaskError, kind="Linear"):
        made(source(net))


def test_what_a_notebook_defines_is_sent_by_value() -> None:
    code = (
        "import torch, lockstep\ndef net(): return torch.nn.Linear(4, 2)\ndata ="
        " torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8,"
        " dtype=torch.long))\nfound = lockstep.benchmark_scaling((net, data,"
        " torch.nn.CrossEntropyLoss()), [1, 2], steps=1, rounds=1)\nprint([row.workers for row in"
        " found.rows])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[1, 2]\n", done.stderr
