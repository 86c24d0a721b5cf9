"""A Task refuses what cannot work, with a sentence that names the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.config.task import EarlyStopping, Task
from lockstep.errors import TaskError, UsageError
from tests.training import toy


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_defaults() -> None:
    task = Task(
        model=toy.Net,
        train_data=toy.data(4, 0),
        loss=toy.loss,
        optimizer=toy.sgd,
        global_batch=4,
        micro_batch=2,
    )
    assert task.inputs(("x", "y")) == ("x",)
    assert (task.epochs, task.seed, task.precision, task.clip, task.eval_data) == (
        1,
        0,
        "fp32",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"micro_batch": 12},
            "micro_batch=12 is larger than global_batch=11: .*make it at most 11",
        ),
        ({"global_batch": 0}, "global_batch=0: give a whole number of at least 1"),
        ({"micro_batch": 2.5}, "micro_batch=2.5: give a whole number"),
        ({"micro_batch": True}, "micro_batch=True: give a whole number"),
        ({"epochs": None}, "epochs=None: give a whole number"),
        ({"eval_micro_batch": 0}, "eval_micro_batch=0"),
        ({"seed": "a"}, "seed='a' is not a whole number"),
        ({"clip": 0.0}, "clip=0.0: the largest norm"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"precision": "fp8"}, "precision='fp8' is unknown: choose one of fp32, bf16, fp16, tf32"),
        ({"unused": "maybe"}, "unused='maybe' is unknown: choose one of error, zeros, skip"),
        ({"callbacks_on": "none"}, "callbacks_on='none' is unknown"),
        ({"scheduler_per": "epoch"}, "scheduler_per='epoch' without a scheduler"),
        ({"train_data": TensorDataset(toy.data(4, 0).tensors[0][:0])}, "train_data is empty"),
        ({"eval_data": []}, "eval_data is empty"),
        (
            {"train_data": iter([1])},
            (
                "train_data is a list_iterator; it must be map-style, .* or iterable, with an"
                " __iter__ that begins anew"
            ),
        ),
        ({"eval_data": Stream()}, "eval_data is a Stream; it must be map-style"),
        (
            {"train_data": Stream(), "order": len},
            "order is given, but train_data is a Stream, which decides itself",
        ),
        ({"order": [1, 2]}, "order is a list, but it must be a function"),
        ({"model": toy.Net()}, "model is a model; give a function that builds it"),
        ({"loss": None}, "loss is a NoneType, but it must be a function"),
        ({"on_step": 3}, "on_step is a int, but it must be a function"),
        (
            {"best": "accuracy"},
            "best='accuracy' and best_mode=None: give the metric's name and 'max' or 'min'",
        ),
        ({"best_mode": "max"}, "best=None and best_mode='max'"),
        ({"best": "accuracy", "best_mode": "most"}, "best_mode='most' is unknown"),
        (
            {"best": "accuracy", "best_mode": "max", "eval_data": None, "metrics": None},
            "best watches 'accuracy', but there is no eval_data",
        ),
        ({"best": "accuracy", "best_mode": "max", "metrics": None}, "metrics= is not given"),
        (
            {"early_stopping": EarlyStopping(metric="f1", mode="max", patience=1), "metrics": None},
            "early_stopping watches 'f1'",
        ),
        ({"eval_data": None}, "metrics is given, but there is no eval_data"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as refused:
        toy.task(**changes)
    assert isinstance(refused.value, UsageError)


def test_early_stopping_is_checked_too() -> None:
    with pytest.raises(TaskError, match="patience=0"):
        EarlyStopping(metric="loss", mode="min", patience=0)
    with pytest.raises(TaskError, match="mode='up' is unknown: choose one of max, min"):
        EarlyStopping(metric="loss", mode="up", patience=1)  # type: ignore[arg-type]


def test_the_loss_may_be_watched_without_metrics() -> None:
    task = toy.task(
        metrics=None,
        best="loss",
        best_mode="min",
        early_stopping=EarlyStopping(metric="loss", mode="min", patience=2),
    )
    assert task.best == "loss"
