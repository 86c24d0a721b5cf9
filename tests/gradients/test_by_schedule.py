"""The bytes of gradients by our own schedules. The gradients: promises/test_same_gradients.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from tests.step import walking  # noqa: F401 - it starts the thread of a team's rank
from tests.teams import on_team

BYTES = 4 * 4 * (64 * 64 + 64)


def sent(world: lockstep.World, reduce: str) -> int:
    """The bytes that this rank sends for the gradients of one step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    stepper = lockstep.Stepper(model, optimizer, reduce=reduce, bucket_mb=0.02, checks="off")  # type: ignore[arg-type]
    assert len(stepper.reducer.buckets) > 1
    assert stepper.reducer.reduction.name == reduce.replace("_", "-")
    before = world.group.bytes_sent
    for x in stepper.micro_batches([torch.randn(3, 64)]):
        stepper.backward(model(x).square().sum(), weight=3)
    stepper.step()
    return world.group.bytes_sent - before


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_byte_is_counted(workers: int) -> None:
    # up one edge each, and down: W - 1 edges, both ways
    assert sum(on_team(sent, workers, ("tree",))) == pytest.approx(
        2 * (workers - 1) * BYTES, rel=0.01
    )
    share = 2 * (workers - 1) / workers * BYTES
    for reduce in ("ring", "halving_doubling") if workers != 3 else ("ring",):
        assert on_team(sent, workers, (reduce,)) == pytest.approx([share] * workers, rel=0.01)
