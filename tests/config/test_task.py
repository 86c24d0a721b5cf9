"""A Task refuses what cannot work, with a sentence that names the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from lockstep.config.parts import Parts
from lockstep.config.task import EarlyStopping
from lockstep.errors import TaskError
from tests.refused import refused
from tests.training import toy


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


ACCURACY = {"best": "accuracy", "best_mode": "max"}
STOPPING = EarlyStopping(metric="f1", mode="max", patience=1)
REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"micro_batch": 12}, "micro-batch-too-large", {"micro_batch": 12, "global_batch": 11}),
    ({"global_batch": 0}, "wrong-value", {"name": "Task.global_batch", "value": 0}),
    ({"micro_batch": 2.5}, "wrong-value", {"name": "Task.micro_batch", "value": 2.5}),
    ({"epochs": None}, "wrong-value", {"name": "Task.epochs", "value": None}),
    ({"eval_micro_batch": 0}, "wrong-value", {"name": "Task.eval_micro_batch"}),
    ({"seed": "a"}, "wrong-value", {"name": "Task.seed", "value": "a"}),
    ({"init_seed": -1}, "wrong-value", {"name": "Task.init_seed", "value": -1}),
    ({"clip": 0.0}, "wrong-value", {"name": "Task.clip", "value": 0.0}),
    ({"clip": float("inf")}, "wrong-value", {"name": "Task.clip"}),
    ({"precision": "fp8"}, "unknown-choice", {"choices": ["fp32", "bf16", "fp16", "tf32"]}),
    ({"unused": "maybe"}, "unknown-choice", {"choices": ["error", "zeros", "skip"]}),
    ({"callbacks_on": "none"}, "unknown-choice", {"name": "Task.callbacks_on"}),
    ({"scheduler_per": "epoch"}, "no-scheduler", {"scheduler_per": "epoch"}),
    ({"train_data": []}, "empty-dataset", {"name": "Task.train_data"}),
    ({"eval_data": []}, "empty-dataset", {"name": "Task.eval_data"}),
    ({"train_data": iter([1])}, "not-a-dataset", {"kind": "list_iterator"}),
    ({"train_data": 3}, "not-a-dataset", {"kind": "int"}),
    ({"eval_data": Stream()}, "not-map-style", {"name": "Task.eval_data", "kind": "Stream"}),
    ({"train_data": Stream(), "order": len}, "numbers-of-stream", {"name": "Task.order"}),
    ({"order": [1, 2]}, "not-a-function", {"name": "Task.order", "kind": "list"}),
    ({"model": toy.Net()}, "model-already-built", {}),
    ({"loss": None}, "not-a-function", {"name": "Task.loss", "kind": "NoneType"}),
    ({"on_step": 3}, "not-a-function", {"name": "Task.on_step", "kind": "int"}),
    ({"parts": {}}, "parts-of-other-type", {"kind": "dict"}),
    ({"best": "accuracy"}, "best-without-mode", {"best": "accuracy", "best_mode": None}),
    ({"best_mode": "max"}, "best-without-mode", {"best": None, "best_mode": "max"}),
    ({**ACCURACY, "best_mode": "most"}, "unknown-choice", {"name": "Task.best_mode"}),
    (
        {**ACCURACY, "eval_data": None, "metrics": None},
        "metric-without-eval-data",
        {"name": "Task.best"},
    ),
    ({**ACCURACY, "metrics": None}, "no-metrics", {"name": "Task.best", "metric": "accuracy"}),
    ({"early_stopping": STOPPING, "metrics": None}, "no-metrics", {"metric": "f1"}),
    ({"eval_data": None}, "metric-without-eval-data", {"name": "Task.metrics"}),
]


def test_what_cannot_work_is_refused() -> None:
    for changes, code, values in REFUSED:
        with refused(code, TaskError, **values):
            toy.task(**changes)


def test_parts_and_early_stopping_are_checked_too() -> None:
    with refused("wrong-value", TaskError, name="EarlyStopping.patience", value=0):
        EarlyStopping(metric="loss", mode="min", patience=0)
    with refused("unknown-choice", TaskError, value="up", choices=["max", "min"]):
        EarlyStopping(metric="loss", mode="up", patience=1)  # type: ignore[arg-type]
    for name, value, code in (
        ("layers", [1], "not-a-function"),
        ("stages", "blocks.2", "wrong-value"),
        ("heads", 0, "wrong-value"),
    ):
        with refused(code, TaskError, name=f"Parts.{name}"):
            Parts(**{name: value})  # type: ignore[arg-type]
    with refused("unknown-choice", TaskError, name="Parts.tensor['a']"):
        Parts(tensor={"a": "diagonal"})  # type: ignore[dict-item]


def test_the_loss_may_be_watched_without_metrics() -> None:
    stopping = EarlyStopping(metric="loss", mode="min", patience=2)
    task = toy.task(metrics=None, best="loss", best_mode="min", early_stopping=stopping)
    assert task.best == "loss"
