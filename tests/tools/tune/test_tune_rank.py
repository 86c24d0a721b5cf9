"""Trials on real ranks: what is timed, what is refused, how many are alive, and that all ranks
get the same answers.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lockstep.config.settings import Settings
from lockstep.testing import run_ranks
from lockstep.tools.timing.in_turns import Trial
from lockstep.tools.tune import tune_rank
from lockstep.tools.tune.search import Refused
from lockstep.tools.tune.tune_rank import Trials, knobs
from lockstep.training.tuned import KNOBS
from lockstep.world.world import World
from tests.training import toy

SETTINGS = Settings(task="toy", workers=2, reduce="native")
DEFAULT = {name: getattr(SETTINGS, name) for name in KNOBS}


def timed(world: World) -> list[Any]:
    """Two threads are made slow, one is not; a loader worker changes how turns are made."""

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        time.sleep(0.02 * (torch.get_num_threads() == 2))
        return toy.loss(output, batch)

    with Trials(toy.task(loss=loss), SETTINGS, world, 100.0) as trials:
        trials.first(DEFAULT)
        base, candidate = trials.time(DEFAULT, {**DEFAULT, "threads": 2}, 0.5)
        loaded, _ = trials.time(DEFAULT, {**DEFAULT, "loader_workers": 1}, 0.0)
        alive = len(trials._alive)
        enough = 0 < trials.left() < 100
    return [
        base,
        candidate,
        len(loaded),
        alive,
        len(trials._alive),
        enough,
        torch.get_num_threads(),
    ]


def test_two_at_a_time_in_turns_and_alike_on_all_ranks() -> None:
    first, second = run_ranks(timed, 2)
    assert first == second
    base, candidate, loaded, alive, after, enough, threads = first
    assert len(base) == len(candidate) >= 3
    assert min(candidate) > 0.02
    assert (loaded, alive, after, enough, threads) == (3, 2, 0, True, 1)


class Whole(torch.optim.SGD):
    """An optimizer that Lockstep does not know to treat every element by itself."""


def refused(world: World) -> str:
    task = toy.task(optimizer=lambda model: Whole(model.parameters(), lr=0.1))
    with Trials(task, SETTINGS, world, 100.0) as trials:
        trials.first(DEFAULT)
        try:
            trials.time(DEFAULT, {**DEFAULT, "update": "sharded"}, 1.0)
        except Refused as refusal:
            trials.time(DEFAULT, {**DEFAULT, "threads": 2}, 0.0)
            return str(refusal)
    return "taken"


def test_what_lockstep_refuses_is_a_sentence_and_the_next_is_timed() -> None:
    found, same = run_ranks(refused, 2)
    assert found == same
    assert "Whole" in found


def what_there_is(world: World, cores: int, reduce: Any) -> dict[str, tuple[Any, ...]]:
    tune_rank.cores = lambda: cores
    settings = Settings(task="toy", workers=world.size, reduce=reduce)
    trial = Trial(toy.task(), settings, world)
    return {
        knob.name: knob.others or (knob.reason,)
        for knob in knobs(settings, trial.training.stepper.reducer, world)
    }


@pytest.mark.parametrize(
    ("workers", "cores", "reduce", "found"),
    [
        (
            1,
            1,
            "auto",
            {"reduce": ("one rank has nothing to sum",), "threads": ("one core a rank",)},
        ),
        (
            2,
            12,
            "native",
            {
                "reduce": ("shared_memory",),
                "update": ("sharded",),
                "threads": (6, 4, 2),
                "loader_workers": (1, 2),
            },
        ),
        (2, 3, "shared_memory", {"reduce": ("native",), "threads": ("one core a rank",)}),
    ],
)
def test_what_can_be_tried(
    workers: int, cores: int, reduce: str, found: dict[str, tuple[Any, ...]]
) -> None:
    assert found.items() <= run_ranks(what_there_is, workers, (cores, reduce))[0].items()


def bucket_sizes(world: World) -> tuple[Any, ...]:
    trial = Trial(toy.task(model=Wide), SETTINGS, world)
    return knobs(SETTINGS, trial.training.stepper.reducer, world)[-1].others


class Wide(torch.nn.Module):
    """30 MiB in layers of 2 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 3)
        self.layers = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(2**19)) for _ in range(15)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + sum(layer.sum() for layer in self.layers)  # type: ignore[no-any-return]


def test_buckets_are_tried_where_they_are_cut_in_another_way() -> None:
    assert run_ranks(bucket_sizes, 2)[0] == (1, 5, 100)


def rates(world: World, per: str) -> tuple[list[int], list[int]]:
    told: list[int] = []

    def scheduler(optimizer: Any, times: int) -> LambdaLR:
        told.append(times)
        return LambdaLR(optimizer, lambda step: 1.0)

    calls: list[Any] = []
    trial = Trial(
        toy.task(scheduler=scheduler, scheduler_per=per, on_step=calls.append),
        Settings(task="toy"),
        world,
    )
    samples = [trial.step() for _ in range(6)]  # more than an epoch
    trial.close()
    assert calls == []
    return told, samples


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_a_trial_outlives_the_tasks_epochs_and_calls_nobody_back(per: str) -> None:
    ((told, samples),) = run_ranks(rates, 1, (per,))
    assert told[0] >= 10**6
    assert samples == [11] * 6
