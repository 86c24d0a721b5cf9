"""The ratio of a task: its own model, micro-batch and loss, and as many micro-batches as a rank of it has."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.collectives.network import Link
from lockstep.measure.ratio_of_task import ratio_of_task
from lockstep.task import Task


def task() -> Task:
    return Task(
        model=lambda: nn.Linear(20, 3),
        train_data=TensorDataset(torch.randn(64, 20), torch.randint(3, (64,))),
        loss=lambda output, batch: (nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=32,
        micro_batch=4,
    )


def test_of_a_task() -> None:
    found = ratio_of_task(task, 3, network=Link(0.0, 1e6))
    assert (found.samples, found.micro_batches) == (4, 3)  # 8 micro-batches over 3 ranks: the rank that has most
    assert found.flops == 2 * (2 * 4 * 20 * 3)
    assert (found.gradient_bytes, found.world_size) == (4 * 63, 3)
    assert found.computation == 3 * (found.forward + found.backward)
