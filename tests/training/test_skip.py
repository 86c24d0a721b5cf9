"""`skip`: steps that are left out change nothing else, at any number of ranks, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

import lockstep
from lockstep.checks.identity import sha256, weights
from lockstep.config.left_out import LeftOut
from lockstep.config.settings import Settings
from lockstep.errors import UsageError, WorkerFailed
from lockstep.training.metrics import forget_after
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy
from tests.training.test_resume import Cut, comparable, records, trained

SKIP = "4:5,8,19:20"
"""Of 5 epochs of 4 steps: over the end of an epoch, a whole end of one, the end of the training."""


def events(folder: Path) -> list[int]:
    """The steps that were left out, as recorded."""
    lines = toy.records(folder, "event")
    return [line["step"] for line in lines if line["event"] == "step left out"]


class Poisoned(Dataset[Any]):
    """Samples of these indices cannot be loaded."""

    def __init__(self, bad: set[int]) -> None:
        self.inner = toy.data(toy.SAMPLES, 1)
        self.bad = bad

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        assert index not in self.bad, index
        return self.inner[index]


def by_hand(world: lockstep.World) -> tuple[str, int]:
    """A loop that leaves out the steps. Returns the digest of the weights and the rate's steps."""
    lockstep.seed(0)
    model = toy.Net()
    optimizer = toy.sgd(model)
    falling = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    stepper = lockstep.Stepper(model, optimizer, exact=True, scheduler=falling, world=world)
    loader = lockstep.Loader(toy.data(toy.SAMPLES, 1), global_batch=11, micro_batch=4, seed=0)
    for epoch in loader.epochs(2):
        for window in epoch:
            if window.step + 1 in (4, 5, 8):
                result = stepper.leave_out()
                assert not result.applied
                assert (result.step, result.weight) == (window.step + 1, 0)
                assert result.samples_by_rank == (0,) * world.size
                continue
            for batch in stepper.micro_batches(window):
                stepper.backward(*toy.loss(model(batch[0]), batch))
            assert stepper.step().step == window.step + 1
    assert stepper.steps == 8
    return sha256(weights(model)), falling.last_epoch


def by_train(world: lockstep.World, loader_workers: int) -> tuple[str, int]:
    loader = lockstep.Loader(range(toy.SAMPLES), global_batch=11, micro_batch=4, rank=0, size=1)
    bad = set().union(*loader.indices(0, 3))
    rates: list[Any] = []

    def falling(optimizer: Any, steps: int) -> Any:
        rates.append(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
        return rates[0]

    task = toy.task(
        train_data=Poisoned(bad), scheduler=falling, eval_data=None, metrics=None, epochs=1
    )
    result = lockstep.train(task, exact=True, skip="4", world=world, loader_workers=loader_workers)
    return result.sha256, rates[0].last_epoch


def without_last(world: lockstep.World) -> str:
    """One epoch that ends after its third step, with the samples that can be loaded."""
    return lockstep.train(
        toy.task(eval_data=None, metrics=None),
        exact=True,
        steps=3,
        world=world,
    ).sha256


def test_a_loop_leaves_out_steps_alike_on_any_number_of_ranks() -> None:
    results = {on_team(by_hand, size)[0] for size in (1, 2, 3)}
    assert len(results) == 1
    assert results.pop()[1] == 5


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_samples_of_left_out_steps_are_not_loaded(loader_workers: int) -> None:
    for digest, rate_steps in on_team(by_train, 2, (loader_workers,)):
        assert rate_steps == 3
        assert digest == on_team(without_last, 1)[0]


def test_a_training_leaves_out_steps_also_after_a_kill(tmp_path: Path) -> None:
    expected = trained(1, tmp_path / "whole", skip=SKIP)
    assert expected["steps"] == 20
    assert events(tmp_path / "whole") == [4, 5, 8, 19, 20]
    steps = records(tmp_path / "whole")
    recorded = [record["step"] for record in steps if "loss" in record]
    assert recorded == [1, 2, 3, 6, 7, *range(9, 19)]
    assert expected["sha256"] != trained(1, tmp_path / "without")["sha256"]
    for size, again in ((2, 1), (1, 3)):
        folder = tmp_path / f"on {size}"
        with pytest.raises(Cut if size == 1 else WorkerFailed):
            trained(size, folder, 10, skip=SKIP)  # after a checkpoint of step 9
        assert comparable(trained(again, folder, skip=SKIP)) == comparable(expected)
        assert events(folder) == [4, 5, 8, 19, 20]
        assert records(folder) == steps


def test_steps_to_come_may_be_left_out_and_steps_that_are_passed_may_not(tmp_path: Path) -> None:
    expected = trained(1, tmp_path / "whole", skip="4:5,11,13")
    folder = tmp_path / "run"
    with pytest.raises(Cut):
        trained(1, folder, 10, skip="4,5")
    for skip in ("4", "4:6", "3:5,13", None):
        with refused("another-training") as refusal:
            trained(1, folder, skip=skip)
        assert "until step 9" in str(refusal.value)
    result = trained(2, folder, skip="13,11,5,4:5")
    assert comparable(result) == comparable(expected)
    assert events(folder) == [4, 5, 11, 13]
    with refused("run-finished"):
        trained(1, folder, skip="4:5,11,14")
    with refused("another-training"):
        trained(1, folder, skip="4:5,11,14", epochs=6)


def test_events_of_steps_that_come_again_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    names = ("step left out", "step skipped", "resumed")
    lines = [{"kind": "event", "event": name, "step": step} for name in names for step in (4, 5)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    forget_after(file, 4, 4)
    left = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in left] == [
        ("step left out", 4),
        ("step skipped", 4),
        ("resumed", 4),
        ("resumed", 5),
    ]


def wrong_calls(world: lockstep.World) -> list[str]:
    model = toy.Net()
    codes = []
    for options in ({}, {"sync_every": 4}, {"update": "server"}):
        stepper = lockstep.Stepper(model, toy.sgd(model), world=world, **options)
        if not options:
            stepper.open([])
        try:
            stepper.leave_out()
        except UsageError as error:
            codes.append(error.code)
        if not options:
            stepper.step()
    return codes


def test_where_no_step_can_be_left_out() -> None:
    expected = ["window-still-open", "skip-does-not-fit", "skip-does-not-fit"]
    assert on_team(wrong_calls, 2) == [expected] * 2
    for options in ({"sync_every": 4}, {"update": "server"}):
        with refused("skip-does-not-fit"):
            Settings(task="toy", skip="3", **options)
    for text in ("", "0", "5:4", "a", "1:2:3", "-1", "1,,2", "9" * 30):
        with refused("wrong-value", name="skip", value=text):
            Settings(task="toy", skip=text)


def test_steps_that_the_training_does_not_have(tmp_path: Path) -> None:
    with refused("skip-after-the-end", skip="20:21", steps=20):
        trained(1, tmp_path / "late", skip="20:21")
    with refused("skip-leaves-nothing", steps=20):
        trained(1, tmp_path / "all", skip="1:7,8:20")


def test_the_same_steps_have_the_same_text() -> None:
    for text, expected in (("7", "7"), ("3:5, 9 ,6", "3:6,9"), ("1:9,2:3", "1:9"), ("8,2", "2,8")):
        assert str(LeftOut.of(text)) == expected
    assert str(LeftOut.of("2:5,9").until(3)) == "2:3"


ranges = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), max_size=4)


@given(ranges, st.integers(0, 20), st.integers(0, 20), st.integers(1, 12))
def test_the_parts_of_an_epoch(
    given_ranges: list[tuple[int, int]], begin: int, length: int, first: int
) -> None:
    texts = [f"{start}:{start + more}" for start, more in given_ranges]
    left_out = LeftOut.of(",".join(texts) if texts else None)
    steps = range(begin, begin + length)
    parts = list(left_out.parts(steps, first))
    assert [step for part, _ in parts for step in part] == list(steps)
    for part, is_left_out in parts:
        assert len(part)
        assert all((step + first in left_out) == is_left_out for step in part)
