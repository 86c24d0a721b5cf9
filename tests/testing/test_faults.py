"""Faults on purpose strike the rank, the step and the phase that they were asked for, and no
other.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lockstep
from lockstep import testing
from lockstep.errors import WorkerFailed
from lockstep.runtime import status
from lockstep.runtime.step_clock import PHASES
from lockstep.testing import faults, run_ranks
from tests.refused import refused


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    yield
    testing.no_faults()
    status.step(0)


def walk(steps: int) -> list[tuple[int, str]]:
    """The phases of so many steps; ends where a fault raises, with that one."""
    seen = []
    for step in range(1, steps + 1):
        status.step(step)
        for phase in ("data", "forward", "backward", "reduce", "optimizer", "loop"):
            seen.append((step, phase))
            try:
                status.enter(phase)
            except RuntimeError:
                return seen
    return seen


def test_it_strikes_once_and_there() -> None:
    testing.fail_at(1, 3, "reduce")
    assert walk(5)[-1] == (3, "reduce")
    assert len(walk(5)) == 30, "only once"


def test_other_ranks_are_spared() -> None:
    testing.fail_at(0, 2, "data")
    assert len(walk(3)) == 18


def test_ones_own_error_and_several_faults() -> None:
    testing.fail_at(1, 2, "forward", KeyError("mine"))
    testing.fail_at(1, 2, "backward")
    status.step(2)
    with pytest.raises(KeyError, match="mine"):
        status.enter("forward")
    with pytest.raises(RuntimeError, match="a fault on purpose: rank 1, step 2, backward"):
        status.enter("backward")


def test_to_be_slow_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    testing.slow_at(1, 2, "data", 0.5)
    walk(4)
    assert slept == [0.5] * 3
    testing.no_faults()
    walk(4)
    assert slept == [0.5] * 3


def test_values_that_cannot_work_are_refused() -> None:
    with refused("unknown-choice", name="phase", value="loading", choices=list(PHASES)):
        testing.kill_at(0, 1, "loading")
    with refused("wrong-value", name="rank", value=-1):
        testing.stop_at(-1, 2, "data")
    with refused("wrong-value", name="seconds", value=0):
        testing.slow_at(0, 2, "data", 0)


def struck(world: lockstep.World, fault: str, **how: Any) -> int:
    getattr(testing, fault)(1, 2, "optimizer", **how)
    model = torch.nn.Linear(2, 1)
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    for _ in range(4):
        for x in stepper.micro_batches([torch.full((2, 2), float(world.rank))]):
            stepper.backward(model(x).sum(), weight=2)
        stepper.step()
    return stepper.steps


@pytest.mark.parametrize(
    ("fault", "how", "said"),
    [
        ("fail_at", {}, "failed: RuntimeError: a fault on purpose: rank 1, step 2, optimizer"),
        ("exit_at", {"code": 7}, "exited with code 7"),
        ("kill_at", {"number": signal.SIGTERM}, "was killed by signal 15"),
        pytest.param("kill_at", {}, "was killed by signal 9", marks=pytest.mark.rest),
    ],
)
def test_in_a_training(fault: str, how: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkerFailed, match=said) as caught:
        run_ranks(struck, 2, args=(fault,), kwargs=how)
    assert caught.value.rank == 1
