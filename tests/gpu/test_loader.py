"""Batches arrive on the device: the right ones, from pinned memory, while it computes."""

from __future__ import annotations

import pytest
import torch

import lockstep
from tests.gpu.training import loader_of, no_waiting, samples


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [None, False])
def test_batches_on_the_device_are_those_of_the_host(
    world: lockstep.World, workers: int, pinned: bool | None
) -> None:
    data = samples()
    host = lockstep.Loader(data, global_batch=16, micro_batch=4, device="cpu", rank=0, size=1)
    there = loader_of(world, num_workers=workers, pin_memory=pinned)
    for ours, theirs in zip(host.epochs(2), there.epochs(2), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            for expected, found in zip(one, other, strict=True):
                assert all(part.device == world.device for part in found)
                assert all(map(torch.equal, expected, [part.cpu() for part in found]))
    there.close()


def test_fetching_does_not_wait_for_the_device(world: lockstep.World) -> None:
    work = torch.rand(256, 256, device=world.device)
    found = []
    with no_waiting(world.device):
        for epoch in loader_of(world).epochs(2):
            for window in epoch:
                for x, _ in window:
                    work = (work @ work).clamp(0, 1)
                    found.append(x.sum() + 0 * work[0, 0])
    assert len(found) == 2 * len(samples()) // 4
