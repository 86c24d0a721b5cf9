"""What a program drops is freed at every door: its model, its gradients and their buckets. Python
frees no cycle that goes through a hook of a parameter, so there must be none.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests import zoo
from tests.step.walking import walk
from tests.teams import on_team

STEPPERS: dict[str, dict[str, Any]] = {
    "a stepper": {},
    "a stepper of a wrapper": {},
    "sharded": {"update": "sharded"},
    "local steps": {"sync_every": 2},
    "no checks": {"checks": "off"},
}


def train(world: lockstep.World, door: str, model: nn.Module) -> None:
    """Three steps."""
    optimizer = torch.optim.Adam(model.parameters())
    if door == "prepare":
        data = DataLoader(TensorDataset(*zoo.samples(24)), batch_size=8)
        model, optimizer, loader = lockstep.prepare(model, optimizer, data, micro_batch=4)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return
    wrapper = lockstep.DistributedDataParallel(model) if "wrapper" in door else model
    if door == "a wrapper":
        for step in range(3):
            x, y = zoo.batch(world.rank, step)
            zoo.loss_sum(wrapper(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return
    stepper = lockstep.Stepper(wrapper, optimizer, **STEPPERS[door])
    for step in range(3):
        walk(stepper, [zoo.batch(world.rank, step)])


def left(world: lockstep.World, door: str, times: int = 1) -> int:
    """How many parameters there are after their model was trained, so often anew, and dropped."""
    model = zoo.build("mlp")
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    for _ in range(times):
        train(world, door, model)
        gc.collect()
    del model
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("door", ["a wrapper", "prepare", *STEPPERS])
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_dropped_is_freed(size: int, door: str) -> None:
    assert on_team(left, size, (door,)) == [0] * size


@pytest.mark.parametrize("door", ["a wrapper", "prepare", "a stepper"])
def test_a_model_is_freed_that_was_trained_twice(door: str) -> None:
    assert on_team(left, 2, (door, 2)) == [0, 0]
