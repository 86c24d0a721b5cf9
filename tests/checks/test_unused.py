"""Parameters that no micro-batch of a step used: the same finding on any number of ranks, also if
some of them have no micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepWarning, UnusedParameters
from tests.teams import on_team

WORKERS = [1, 3, pytest.param(2, marks=pytest.mark.rest)]
METHODS: list[dict[str, Any]] = [
    {},
    {"update": "sharded"},
    {"exact": True},
    {"exact": True, "update": "sharded"},
    {"reduce": "native"},
    {"reduce": "central"},
    {"reduce": "ring", "update": "sharded"},
]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(5, 70), nn.Linear(70, 3), nn.Linear(70, 3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return (self.second if step % 2 else self.first)(torch.tanh(self.body(x)))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = TwoHeads().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.2)


def data() -> TensorDataset:
    """For steps of 2, 2 and 1 micro-batches: of 3 ranks at least one idles, of 2 in the last."""
    x = torch.randn(10, 5, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return TensorDataset(x, x[:, :3].square())


def windows() -> Iterator[tuple[int, Any]]:
    loader = lockstep.Loader(data(), global_batch=4, micro_batch=2, seed=0)
    steps = 0
    for epoch in loader.epochs(2):
        for window in epoch:
            yield steps, window
            steps += 1


def skipping(world: lockstep.World, method: dict[str, Any]) -> Any:
    model, optimizer = made()
    stepper = lockstep.Stepper(model, optimizer, unused="skip", **method)
    unused = []
    for step, window in windows():
        for x, y in stepper.micro_batches(window):
            stepper.backward(F.mse_loss(model(x, step), y, reduction="sum"), weight=len(x))
        stepper.step()
        unused.append([name for name, each in model.named_parameters() if each.grad is None])
    return [each.detach() for each in model.parameters()], unused


def skipping_by_every_method(world: lockstep.World) -> Any:
    return [skipping(world, method) for method in METHODS]


def skipping_in_one_process() -> Any:
    """What a loop without Lockstep computes over the same samples."""
    model, optimizer = made()
    unused = []
    with lockstep.init():
        batches = [(step, list(window)) for step, window in windows()]
    for step, micro_batches in batches:
        optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        (F.mse_loss(model(x, step), y, reduction="sum") / len(x)).backward()
        optimizer.step()
        unused.append([name for name, each in model.named_parameters() if each.grad is None])
    return [each.detach() for each in model.parameters()], unused


@pytest.mark.parametrize("workers", WORKERS)
def test_what_nobody_used_does_not_move_on_any_number_of_ranks(workers: int) -> None:
    weights, unused = skipping_in_one_process()
    assert unused[0] == ["second.weight", "second.bias"]
    assert unused[1] == ["first.weight", "first.bias"]
    for rank in on_team(skipping_by_every_method, workers):
        for method, (found, skipped) in zip(METHODS, rank, strict=True):
            assert skipped == unused, method
            for ours, theirs in zip(found, weights, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=str(method))


def refusing(world: lockstep.World) -> list[list[str]]:
    names = []
    for method in METHODS:
        model, optimizer = made()
        stepper = lockstep.Stepper(model, optimizer, **method)
        _, window = next(windows())
        for x, y in stepper.micro_batches(window):
            stepper.backward(F.mse_loss(model(x, 0), y, reduction="sum"), weight=len(x))
        with pytest.raises(UnusedParameters) as caught:
            stepper.step()
        names.append(caught.value.values["names"])
    return names


@pytest.mark.parametrize("workers", WORKERS)
def test_what_nobody_used_is_an_error_on_any_number_of_ranks(workers: int) -> None:
    ranks = on_team(refusing, workers)
    assert ranks == [[["second.weight", "second.bias"]] * len(METHODS)] * workers


def used_by_rank_1(world: lockstep.World) -> list[str]:
    """Of the ranks with micro-batches, 0 and 1, only rank 1 uses the second head."""
    model, optimizer = made()
    stepper = lockstep.Stepper(model, optimizer, unused="zeros")
    x = torch.full((2, 5), 1.0 + world.rank, dtype=torch.double)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in stepper.micro_batches([x] if world.rank < 2 else []):
            loss = model(batch, 0).sum()
            if world.rank == 1:
                loss = loss + model(batch, 1).sum()
            stepper.backward(loss, weight=2)
        stepper.step()
    return [str(each.message) for each in caught if each.category is LockstepWarning]


def test_a_rank_without_micro_batches_is_not_said_to_miss_a_gradient() -> None:
    (message,), *others = on_team(used_by_rank_1, 3)
    assert "'second.weight', 'second.bias'" in message
    assert "rank 0" in message
    assert "2" not in message
    assert others == [[], []]
