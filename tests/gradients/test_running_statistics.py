"""Buffers that a forward changes, and that may be no running means."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import LockstepWarning
from lockstep.world.world import World
from tests.teams import on_team


class Queue(nn.Module):
    """A queue of features and its pointer, as MoCo's, behind a BatchNorm."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(8, 2))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        features = self.norm(self.layer(x))
        first = int(self.pointer)
        self.queue[first : first + len(x)] = features.detach()
        self.pointer.add_(len(x)).remainder_(8)
        return features


def three_steps(world: World) -> list[str]:
    """Train for three steps. Returns what is warned of."""
    model = Queue()
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LockstepWarning)
        for _ in range(3):
            for x in stepper.micro_batches([torch.ones(2, 3) + world.rank]):
                stepper.backward(model(x).square().sum(), weight=len(x))
            stepper.step()
    return [str(warning.message) for warning in caught]


def test_buffers_of_ones_own_that_move_are_named_once() -> None:
    (text,), others = on_team(three_steps, 2)
    assert others == []
    assert "the buffers 'queue', 'pointer'." in text
    assert "norm.running_mean" not in text
