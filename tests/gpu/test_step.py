"""What only a GPU can show: a step does not wait for the device. Skipped without one; fails
where LOCKSTEP_REQUIRE_GPU=1 says there is one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("LOCKSTEP_REQUIRE_GPU") != "1",
        reason="no CUDA device",
    ),
]


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init() as opened:
        assert opened.device.type == "cuda"
        yield opened


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(count)
    ]
    return [(x.cuda(), y.cuda()) for x, y in pairs]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_does_not_synchronise(
    world: lockstep.World, clip: float | None, scaled: bool
) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda") if scaled else None
    stepper = lockstep.Stepper(model, optimizer, clip=clip, scaler=scaler)
    windows = [batches(2) for _ in range(6)]
    results = []
    for number, window in enumerate(windows):
        # the first ones lay buckets, agree and compare
        torch.cuda.set_sync_debug_mode("error" if number >= 3 else "default")
        try:
            for x, y in stepper.micro_batches(window):
                stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            results.append(stepper.step())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(result.applied for result in results)
    assert all((result.norm is None) == (clip is None) for result in results)


def test_the_steps_of_a_gpu_equal_those_of_a_cpu(world: lockstep.World) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    plain.load_state_dict(ours.state_dict())
    ours = ours.cuda()
    stepper = lockstep.Stepper(
        ours, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), clip=1.0
    )
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for window in [batches(3) for _ in range(4)]:
        for x, y in stepper.micro_batches(window):
            stepper.backward(F.cross_entropy(ours(x), y, reduction="sum"), weight=len(y))
        stepper.step()
        sgd.zero_grad()
        (
            sum(F.cross_entropy(plain(x.cpu()), y.cpu(), reduction="sum") for x, y in window) / 24
        ).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        sgd.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.cpu(), b, atol=1e-5)


def test_sync_batch_norm_converts_and_trains(world: lockstep.World) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
    ddp = lockstep.DistributedDataParallel(model)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x, y in batches(3):
        sgd.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        sgd.step()
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert int(model[1].num_batches_tracked) == 3  # type: ignore[arg-type]
