"""A training that was cut off goes on in its run directory as if nothing had been: weights,
records, best, patience, at any number of ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.config.settings import Settings
from lockstep.config.task import EarlyStopping
from lockstep.errors import WorkerFailed
from lockstep.testing import run_ranks
from lockstep.training.metrics import forget_after
from lockstep.training.resume import changed_since
from lockstep.training.train import train
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy

Whole = Callable[[int], tuple[Any, list[Any]]]


class Cut(Exception):
    pass


def task(cut: int | None, **changes: Any) -> lockstep.Task:
    """Of 5 epochs of 4 steps; every rank fails after step `cut`, or in the evaluation after it
    where that is negative.
    """

    def on_step(record: Any) -> None:
        if record["step"] == cut:
            raise Cut

    def on_evaluate(record: Any) -> None:
        if cut is not None and record["step"] == -cut:
            raise Cut

    fields = {
        "epochs": 5,
        "clip": 0.5,
        "best": "accuracy",
        "best_mode": "max",
        "early_stopping": EarlyStopping(metric="loss", mode="min", patience=9),
        # its rate depends on its own count of steps, and not only on the rate before
        "scheduler": lambda optimizer, epochs: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: 0.7**epoch
        ),
        "scheduler_per": "epoch",
    }
    callbacks = {"on_step": on_step, "on_evaluate": on_evaluate, "callbacks_on": "all"}
    return toy.task(**{**fields, **callbacks, **changes})


def one(
    world: lockstep.World,
    folder: str,
    cut: int | None,
    every: int,
    changes: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    result = train(
        task(cut, **changes), run=folder, exact=True, checkpoint_every=every, world=world, **options
    )
    return result.as_json()


def trained(
    size: int,
    folder: Path,
    cut: int | None = None,
    every: int = 3,
    changes: Any = None,
    **options: Any,
) -> Any:
    """By one process or several ranks. Raises Cut or WorkerFailed if it is cut off."""
    args = (str(folder), cut, every, changes or {}, options)
    if size == 1:
        return toy.alone(one, *args)
    # what a training that fails leaves in its ranks ends with them
    return (on_team if cut is None else run_ranks)(one, size, args)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """By how often it saves: what a training of one rank that was not cut off ends with, and its
    records.
    """

    @cache
    def of(every: int) -> tuple[Any, list[Any]]:
        folder = tmp_path_factory.mktemp("whole")
        result = trained(1, folder, every=every)
        return comparable(result), records(folder)

    return of


def records(folder: Path) -> list[Any]:
    """What does not depend on time, or on who computed it."""
    keep = {
        "step": ("step", "epoch", "loss", "weight", "lr"),
        "evaluate": ("step", "epoch", "metrics"),
    }
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {name: line[name] for name in keep[line["kind"]]} for line in lines if line["kind"] in keep
    ]


def comparable(result: Any) -> Any:
    others = ("seconds", "workers", "reduce", "update")
    return {name: value for name, value in result.items() if name not in others}


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(8, id="end", marks=pytest.mark.rest),
        pytest.param(-8, id="evaluation"),
        pytest.param(9, id="next", marks=pytest.mark.rest),
        pytest.param(20, id="last", marks=pytest.mark.rest),
        pytest.param(-20, id="last-evaluation"),
    ],
)
def test_a_training_that_was_cut_off_goes_on_as_if_nothing_had_been(
    tmp_path: Path, whole: Whole, cut: int
) -> None:
    """Checkpoints are of steps 4, 8, ...: also at an epoch's end, before its evaluation."""
    with pytest.raises(Cut):
        trained(1, tmp_path / "cut", cut, every=4)
    result = trained(3, tmp_path / "cut", every=4, update="sharded")
    assert (comparable(result), records(tmp_path / "cut")) == whole(4)
    events = toy.records(tmp_path / "cut", "event")
    (resumed,) = [event["line"] for event in events if event["event"] == "resumed"]
    # on_step is called before the checkpoint of its step, and the last one may have been under way
    # in the background
    last = (cut - 1) // 4 * 4 if cut > 0 else -cut
    assert resumed in [f"resumed from step {step} of 20" for step in range(4, last + 1, 4)]


def test_cut_off_again_and_again(tmp_path: Path, whole: Whole) -> None:
    for size, cut in ((1, 2), (2, 5), (1, 11), (3, 13)):
        with pytest.raises((WorkerFailed, Cut)):
            trained(size, tmp_path / "cut", cut)
    assert (comparable(trained(2, tmp_path / "cut")), records(tmp_path / "cut")) == whole(3)


def test_another_training_is_refused_with_the_difference(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        trained(1, tmp_path, 7)
    for changes, options, message in (
        ({"clip": None}, {}, "clip was 0.5 and is None"),
        ({"global_batch": 12}, {}, "global_batch was 11 and is 12"),
        ({"init_seed": 0}, {}, "init_seed was None and is 0"),
        ({"optimizer": lambda model: torch.optim.SGD(model.parameters())}, {}, "optimizer was"),
        ({}, {"precision": "bf16"}, "precision was not given and is bf16"),
        ({}, {"epochs": 3}, "epochs was not given and is 3"),
    ):
        with refused("another-training") as refusal:
            trained(1, tmp_path, changes=changes, **options)
        assert message in str(refusal.value)
    trained(1, tmp_path)
    with refused("run-finished"):
        trained(1, tmp_path)


def test_a_finished_run_goes_on_with_more_epochs_and_with_nothing_else(
    whole: Whole, tmp_path: Path
) -> None:
    trained(2, tmp_path, epochs=2)
    result, steps = whole(3)
    for options in ({"epochs": 1}, {"epochs": 5, "precision": "bf16"}):
        with refused("run-finished"):
            trained(1, tmp_path, **options)
    with refused("another-training") as refusal:
        trained(1, tmp_path, changes={"clip": None}, epochs=5)
    assert "clip was 0.5 and is None" in str(refusal.value)
    assert comparable(trained(1, tmp_path, epochs=5)) == result
    assert records(tmp_path) == steps


def test_settings_that_decide_nothing_may_change() -> None:
    before = Settings(task="toy", workers=2, exact=True)
    knobs = {"update": "sharded", "reduce": "native", "loader_workers": 2}
    assert not Settings(task="toy", workers=3, exact=True, **knobs).differences(before)
    threads = Settings(task="toy", exact=True, threads=2).differences(before)
    assert threads == ["threads was not given and is 2"]
    assert not Settings(task="toy", threads=2).differences(Settings(task="toy"))
    overridden = Settings(task="toy", overrides={"lr": "1"}).differences(Settings(task="toy"))
    assert overridden == ["overrides was {} and is {'lr': '1'}"]


def test_records_of_steps_that_come_again_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [
        {"kind": "event", "event": "start"},
        *[{"kind": "step", "step": step} for step in (1, 2, 3, 4)],
        {"kind": "evaluate", "step": 2},
        {"kind": "evaluate", "step": 4},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    forget_after(file, 4, 2)
    assert list(map(json.loads, file.read_text().splitlines())) == lines[:-1]
    forget_after(tmp_path / "nowhere", 1, 1)


def halved(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    loss, weight = toy.loss(output, batch)
    return loss * 0.5, weight


def test_a_task_that_changed_since_is_named_and_refused_in_exact_mode(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Cut):
        trained(1, tmp_path / "run", 7)
    for number, (changes, named) in enumerate(
        (({"loss": halved}, "halved"), ({"train_data": toy.data(toy.SAMPLES, 7)}, "sample "))
    ):
        run = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        with refused("task-changed") as refusal:
            trained(1, run, changes=changes)
        assert named in str(refusal.value)
        assert trained(1, run, changes=changes, allow_changes=True)["steps"] == 20
        (changed,) = [event for event in toy.records(run, "event") if "changes" in event]
        assert named in changed["changes"]
    # otherwise it is warned of
    with pytest.raises(Cut):
        train(task(7), run=tmp_path / "warned", checkpoint_every=3)
    train(task(None, loss=halved), run=tmp_path / "warned", checkpoint_every=3)
    assert "halved" in capfd.readouterr().err


def test_checkpoints_of_earlier_versions_say_nothing_of_changes(tmp_path: Path) -> None:
    with lockstep.init() as world:
        assert changed_since({}, {"loss": "a"}, tmp_path, world, refuse=True) == ""
