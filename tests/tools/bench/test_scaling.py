"""`lockstep.benchmark_scaling`: from turns to rows, and a measurement on real ranks.

What `benchmark_scaling` takes for a task, and what it says of anything else.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.errors import TaskError
from lockstep.tools.bench import scaling
from lockstep.tools.bench.scaling import global_batches, uneven
from lockstep.tools.bench.speedup import ScalingRow, Turn
from lockstep.tools.bench.task_source import Source, make_task, source_of
from tests.refused import refused
from tests.training import toy


def toy_task() -> lockstep.Task:
    return toy.task(global_batch=16, micro_batch=4)


class Machine:
    """In place of ranks: seconds of a step by (workers, global batch)."""

    def __init__(self, seconds: dict[tuple[int, int], float]) -> None:
        self.seconds = seconds
        self.turns: list[int] = []

    def __call__(self, timed: Any, workers: int) -> list[Turn]:
        self.turns.append(workers)
        batch, steps = timed.global_batch, timed.steps
        seconds = steps * self.seconds[workers, batch]
        return [Turn(samples=steps * batch, seconds=seconds, threads=1, reduction="native")]


def measured(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[tuple[int, int], float],
    workers: Any,
    **options: Any,
) -> tuple[list[ScalingRow], Machine]:
    machine = Machine(seconds)
    monkeypatch.setattr(scaling, "launch", machine)
    result = lockstep.benchmark_scaling(toy_task, workers, device="cpu", **options)
    assert result.mode == options.get("mode", "strong")
    return result.rows, machine


SECONDS = {(1, 16): 0.4, (2, 16): 0.25, (4, 16): 0.2, (2, 32): 0.5}


def test_rows_follow_from_the_turns_which_go_to_and_fro(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, machine = measured(monkeypatch, SECONDS, [1, 2, 4], steps=3, rounds=2)
    assert [row.samples_per_s for row in rows] == pytest.approx([40, 64, 80])
    assert [row.efficiency for row in rows] == pytest.approx([1, 0.8, 0.5])
    assert [row.step_ms for row in rows] == pytest.approx([400, 250, 200])
    assert machine.turns == [1, 2, 4, 4, 2, 1]

    weak, _ = measured(monkeypatch, SECONDS, [1, 2], mode="weak")  # with a batch of 32 on two
    assert (weak[1].samples_per_s, weak[1].efficiency) == pytest.approx((64, 0.8))
    from_four, _ = measured(monkeypatch, SECONDS, [4, 2])
    assert [row.efficiency for row in from_four] == pytest.approx([1, 1.6])


def test_strong_keeps_the_global_batch_and_weak_that_of_a_rank() -> None:
    task = toy.task(global_batch=8, micro_batch=2)
    assert global_batches("strong", task, [1, 2, 3]) == {1: 8, 2: 8, 3: 8}
    assert global_batches("weak", task, [1, 2, 3]) == {1: 8, 2: 16, 3: 24}
    assert global_batches("weak", task, [4, 1, 6]) == {4: 8, 1: 2, 6: 12}
    with refused("weak-scaling-uneven", global_batch=8, micro_batch=2, workers=3):
        global_batches("weak", task, [3, 4])

    three, sixteen = uneven({1: 64, 2: 64, 3: 64, 16: 64}, 8)
    assert three.startswith("3 workers: 8 micro-batches, so 2 ranks of 3 have 3 and the others 2")
    assert "89 %" in three
    assert "50 %" in sixteen
    assert uneven({1: 64, 3: 192}, 8) == []


class Counting(TensorDataset):
    """Counts what is fetched."""

    fetched = 0

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("loading", "windows"), [(True, 8), (False, 4)])
def test_a_turn_has_the_batch_and_the_threads_that_were_asked_for(
    loading: bool, windows: int
) -> None:
    """Three steps to warm up and five; without loading, the first four windows again and again."""
    data, threads = Counting(*toy.data(40, 1).tensors), set()

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        threads.add(torch.get_num_threads())
        return toy.loss(output, batch)

    task = toy.task(global_batch=16, micro_batch=4, loss=loss, train_data=data)
    settings = Settings(task="toy", device="cpu", threads=2)
    turn = scaling._TimedSteps(lambda: task, settings, 8, 5, loading)()
    assert (turn.samples, turn.threads, threads) == (5 * 8, 2, {2})
    assert turn.seconds > 0
    assert data.fetched == windows * 8


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"workers": []}, "wrong-value", {"name": "workers", "value": []}),
        ({"workers": [1, 0]}, "wrong-value", {"value": 0}),
        ({"workers": [True, 2]}, "wrong-value", {"value": True}),
        ({"workers": [2, 1, 2]}, "given-twice", {"where": "workers=2,1,2", "name": 2}),
        ({"workers": "1,2"}, "wrong-value", {"name": "workers", "value": "1,2"}),
        ({"workers": 4}, "wrong-value", {"name": "workers", "value": 4}),
        ({"steps": 0}, "wrong-value", {"name": "steps", "value": 0}),
        ({"rounds": 1.5}, "wrong-value", {"name": "rounds", "value": 1.5}),
        ({"mode": "both"}, "unknown-choice", {"name": "mode", "value": "both"}),
        ({"threads": 0}, "wrong-value", {"name": "threads", "value": 0}),
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
    monkeypatch.setattr(scaling, "launch", None)
    with refused(code, **values):
        lockstep.benchmark_scaling(toy_task, **{"workers": [1, 2]} | options)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, device in ((2, "auto"), (2, "cuda"), (0, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with refused("too-few-gpus", workers=4, gpus=gpus):
            lockstep.benchmark_scaling(toy_task, [1, 4], device=device)  # type: ignore[arg-type]


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
    assert (one.workers, one.speedup, one.efficiency) == (1, 1, 1)
    assert two.speedup == two.samples_per_s / one.samples_per_s
    assert two.efficiency == two.speedup / 2
    assert two.low <= two.samples_per_s <= two.high
    assert two.step_ms == pytest.approx(1e3 * 16 / two.samples_per_s)  # the medians of one turn


NOTHING = {"global_batch": None, "micro_batch": None, "optimizer": None}
DATA = TensorDataset(torch.randn(200, 4), torch.randint(0, 2, (200,)))


def net() -> nn.Module:
    return nn.Linear(4, 2)


def per_sample(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def source(
    given: Any, workers: Any = (1, 2), growth: float = 1.0, overrides: Any = None, **parts: Any
) -> Source:
    return source_of(given, workers, growth, overrides, NOTHING | parts)


def sent(given: Source) -> Task:
    """As a rank gets it."""
    return make_task(pickle.loads(pickle.dumps(given)))


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


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), per_sample])
@pytest.mark.parametrize("model", [net(), net])
def test_a_model_a_data_set_and_a_loss_become_a_task(model: Any, loss: Any) -> None:
    task = sent(source((model, DATA, loss)))
    first, second = task.model(), task.model()
    assert first is not second
    if isinstance(model, nn.Module):
        torch.testing.assert_close(first.state_dict(), model.state_dict(), rtol=0, atol=0)
    batch = DATA[:10]
    total, weight = task.loss(first(batch[0]), batch)
    if loss is not per_sample:
        assert weight == 10
    torch.testing.assert_close(total, F.cross_entropy(first(batch[0]), batch[1], reduction="sum"))


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
    task = source((net, DATA, nn.CrossEntropyLoss()), workers, growth, optimizer=toy.sgd, **parts)()
    assert (task.global_batch, task.micro_batch) == expected
    assert task.optimizer(net()).param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("given", "code", "values"),
    [
        ((net, DATA), "not-model-dataset-loss", {"given": "a tuple of 2"}),
        ((net, DATA, None), "not-model-dataset-loss", {"given": "(function, ..., NoneType)"}),
        ((net, iter([]), nn.MSELoss()), "not-map-style", {"name": "dataset"}),
        (nn.Linear(1, 1), "not-a-task-source", {"kind": "Linear"}),
        (3, "not-a-task-source", {"kind": "int"}),
    ],
)
def test_what_is_no_task_is_refused(given: Any, code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        source(given)


def test_a_model_and_a_data_set_without_a_loss_are_refused() -> None:
    """The call of teaching texts."""
    with refused("not-model-dataset-loss", given="a Linear without a loss"):
        lockstep.benchmark_scaling(nn.Linear(6, 3), DATA, [1, 2, 4, 8])  # type: ignore[arg-type]


def test_what_ranks_cannot_get_is_refused() -> None:
    with refused("call-not-sendable"):
        lockstep.benchmark_scaling((lambda: net(), DATA, nn.MSELoss()), [1])


def test_options_of_another_kind_of_task_are_refused() -> None:
    with refused("not-for-a-task", name="global_batch", value=8):
        source("digits", global_batch=8)
    with refused("overrides-without-file", overrides={"lr": "1"}):
        source(toy.task, overrides={"lr": "1"})
    with refused("wrong-return-type", TaskError, type="Linear"):
        make_task(source(net))
