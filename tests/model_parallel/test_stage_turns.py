"""A pipeline's steps on the step clock: forwards and backwards are computed, and all between
them waited.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from lockstep import World
from lockstep.model_parallel.pipeline import Pipeline
from lockstep.runtime import status
from lockstep.runtime.step_clock import StepClock, StepTimes
from lockstep.testing import run_ranks

_SLEEPS = 0.05  # s, a micro-batch on the second stage
_COUNT = 6


class Dawdles(nn.Linear):
    """Takes its time forward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(_SLEEPS)
        return super().forward(x)


def timed(world: World) -> tuple[StepTimes, StepTimes]:
    """A window trained, and one run forward only: the second is no part of a step."""
    stages = {0: nn.Linear(4, 4)} if world.rank == 0 else {1: Dawdles(4, 4)}
    pipeline = Pipeline(stages, 2, world.group, torch.device("cpu"), "1f1b")
    inputs = [(torch.randn(2, 4),) for _ in range(_COUNT)]
    pipeline.train(inputs, lambda number, output: output.sum())
    clock = StepClock()
    status.open_clock(clock)
    pipeline.train(inputs, lambda number, output: output.sum())
    clock.end(1)
    with status.inside("evaluate"):
        pipeline.forward(inputs, lambda number, output: None)
    clock.end(2)
    trained, evaluated = clock.finished()
    return trained, evaluated


def test_a_stage_that_is_quick_waits_for_one_that_is_not() -> None:
    quick, slow = run_ranks(timed, 2)
    assert slow[0].forward >= _COUNT * _SLEEPS
    assert slow[0].waits < quick[0].waits
    assert quick[0].waits >= (_COUNT - 2) * _SLEEPS
    for trained, evaluated in (quick, slow):
        assert trained.backward > 0
        assert evaluated.evaluate > _SLEEPS
        assert evaluated.forward == 0
