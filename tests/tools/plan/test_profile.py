"""How a profile is made: phases of ranks side by side, on a task that is over
in a moment.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Task
from lockstep.errors import WorkerFailed
from lockstep.tools.plan.profile import profile as measured
from lockstep.tools.plan.profile import spread_of


def test_what_slows_all_ranks_of_a_step_is_no_spread() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = 1 + 5 * torch.rand(400, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(2, 400, generator=generator, dtype=torch.float64)
    together = torch.stack([steps, steps]) + noise
    assert spread_of(together) * together.median() == pytest.approx(0.1, rel=0.15)
    assert spread_of(torch.stack([steps, steps])) == 0
    # a rank alone is compared with itself
    alone = 2 + 0.1 * torch.randn(1, 4000, generator=generator, dtype=torch.float64)
    assert spread_of(alone) == pytest.approx(0.05, rel=0.1)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def small() -> Task:
    data = TensorDataset(torch.randn(70, 16), torch.zeros(70, dtype=torch.int64))
    return Task(
        model=lambda: nn.Sequential(
            nn.Linear(16, 300_000 // 16), nn.BatchNorm1d(18_750), nn.Linear(18_750, 3)
        ),
        train_data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=16,
        micro_batch=4,
    )


def test_two_ranks_side_by_side() -> None:
    found = measured(small, [2], 0.01, "cpu", cores=2, talking=[2])
    side = found.sides[2]
    assert found.messages[2] > 0
    assert (side.ranks, found.global_batch, found.micro_batch, found.width) == (2, 16, 4, 4)
    assert min(side.forward, side.backward, side.optimizer, side.loading) > 0
    ready = [bucket.ready for bucket in found.buckets]
    assert ready == sorted(ready)
    assert 0 < ready[0] <= ready[-1] <= 1
    shapes = [shape for bucket in found.buckets for shape in bucket.tensors]
    assert set(shapes[:2]) == {(3,), (3, 18_750)}  # what is computed last is complete first
    assert sum(bucket.elements for bucket in found.buckets) == sum(
        each.numel() for each in small().model().parameters()
    )
    assert found.buffers == 2 * 4 * 18_750


def too_large() -> Task:
    return replace(small(), micro_batch=16)


def test_a_rank_without_a_micro_batch_is_refused() -> None:
    with pytest.raises(WorkerFailed, match="idle-rank-profiled"):
        measured(too_large, [2], 0.01, "cpu", cores=2)
