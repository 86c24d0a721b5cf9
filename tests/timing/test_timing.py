"""A recording has the phases and the buckets of each step, on each rank; a trial trains a task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.runs import Settings
from lockstep.tasks import digits
from tests.teams import on_team

STEPS = 4


def stepper_of(world: lockstep.World) -> tuple[lockstep.Stepper, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(4)])
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    return lockstep.Stepper(model, sgd, bucket_mb=2.0, world=world), model


def train(stepper: lockstep.Stepper, model: nn.Module, steps: int = STEPS) -> None:
    for _ in range(steps):
        for x in stepper.micro_batches([torch.randn(64, 600)] * 2):
            stepper.backward(model(x).square().sum(), weight=len(x))
        stepper.step()


def recorded(world: lockstep.World) -> list[dict[str, Any]]:
    stepper, model = stepper_of(world)
    train(stepper, model, 2)
    with lockstep.timing.recording(stepper) as times:
        train(stepper, model)
    train(stepper, model, 1)  # not recorded any more
    steps = []
    for step, buckets in times.steps:
        backward = [span for span in step.spans if span.phase == "backward"]
        steps.append(
            {
                "step": step.step,
                "phases": [getattr(step, phase) for phase in lockstep.timing.PHASES],
                "seconds": step.seconds,
                "backward": backward,
                "buckets": buckets,
                "members": [len(members) for members in times.parameters],
                "text": times.describe(),
            }
        )
    return steps


@pytest.mark.parametrize("workers", [1, 2])
def test_each_rank_records_phases_and_buckets(workers: int) -> None:
    for steps in on_team(recorded, workers):
        assert [step["step"] for step in steps] == [3, 4, 5, 6]
        for step in steps:
            assert min(step["phases"]) >= 0
            assert sum(step["phases"]) == pytest.approx(step["seconds"])
            assert len(step["backward"]) == 2  # of each micro-batch
            left = [bucket.left for bucket in step["buckets"]]
            assert left == sorted(left)
            assert len(left) == len(step["members"]) > 2
            assert sum(step["members"]) == 8
            _, _, begin, end = step["backward"][-1]
            assert begin < left[0] < end  # the first bucket leaves during the last backward
            for bucket in step["buckets"]:
                assert bucket.arrived is not None
                assert bucket.arrived >= bucket.left
        assert steps[0]["text"].startswith("4 steps of ")


def medians(world: lockstep.World) -> tuple[int, int, dict[str, float]]:
    settings = Settings(task="digits", workers=world.size, device="cpu")
    with (
        lockstep.timing.trial(digits.task(), settings, world, records=True) as trial,
        lockstep.timing.recording(trial.stepper) as times,
    ):
        for window in trial.windows():
            trial.step(window)
            if trial.start_together(stop=len(times.steps) >= 3 + world.rank):
                break
        return trial.stepper.steps, len(times.steps), times.medians()


def test_a_trial_trains_a_task_until_all_ranks_have_enough() -> None:
    results = on_team(medians, 2)
    assert [result[:2] for result in results] == [(4, 4), (4, 4)]
    for _, _, phases in results:
        assert min(phases["data"], phases["forward"], phases["backward"], phases["optimizer"]) > 0


def kept(world: lockstep.World) -> tuple[list[int], str]:
    stepper, model = stepper_of(world)
    with lockstep.timing.recording(stepper, most=2) as times:
        train(stepper, model)
        steps = [step.times.step for step in times.steps]
        times.clear()
        return steps, times.describe()


def test_the_latest_steps_are_kept() -> None:
    assert on_team(kept, 1) == [([3, 4], "no steps")]
