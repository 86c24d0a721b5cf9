"""What `benchmark_scaling` takes for a task, and what it says of anything else."""

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

from lockstep.config.task import Task
from lockstep.errors import TaskError
from lockstep.tools.bench.scaling.benchmark import Source, made, source_of
from tests.refused import refused
from tests.training import toy

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
