"""Scaling rules and the warm-up, against the numbers of the paper they come from."""

from __future__ import annotations

import pytest
import torch

import lockstep
from lockstep.step.learning_rate import warmup
from tests.refused import refused


def test_the_rules_are_goyals_and_the_square_root() -> None:
    assert lockstep.scale_lr(0.1, 256, 8192) == pytest.approx(3.2)
    assert lockstep.scale_lr(3e-4, 256, 1024, rule="sqrt") == pytest.approx(6e-4)
    assert lockstep.scale_lr(0.3, 64, 64) == 0.3


def test_nonsense_is_refused() -> None:
    for arguments, name in (
        ((0.1, 0, 64), "base_batch"),
        ((0.1, 64, -1), "global_batch"),
        ((0.0, 64, 64), "lr"),
    ):
        with refused("wrong-value", name=name):
            lockstep.scale_lr(*arguments)
    with refused("unknown-choice", name="rule"):
        lockstep.scale_lr(0.1, 64, 64, "cubic")  # type: ignore[arg-type]
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    for steps, start, name in ((0, 0.5, "steps"), (5, 0.0, "start"), (5, 1.5, "start")):
        with refused("wrong-value", name=name):
            warmup(sgd, steps, start)


def test_the_warmup_rises_in_a_straight_line_and_stays() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3.2)
    scheduler = warmup(sgd, steps=4, start=1 / 32)
    rates = []
    for _ in range(7):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    assert rates == pytest.approx([0.1, 0.875, 1.65, 2.425, 3.2, 3.2, 3.2])
