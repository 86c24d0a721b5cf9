"""A task whose optimizer amplifies rounding errors: BatchNorm cancels a convolution's bias, and
AdamW makes whole steps of its gradient's noise.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep import Task


class ByRank(torch.optim.AdamW):
    """Its learning rate depends on the rank."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 1e-3 * (1 + torch.distributed.get_world_size())
        return super().step(closure)


def net() -> nn.Module:
    head = (nn.Flatten(), nn.Linear(4 * 16, 3))
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        *head,
    )


def task(fault: str = "") -> Task:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        found = F.cross_entropy(output, batch[1], reduction="sum")
        if fault == "loss by rank":
            found = found * (1 + 1e-6 * int(os.environ["RANK"]))  # WHERE loss by rank
        return found, len(batch[1])

    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    make = ByRank if fault == "optimizer by size" else torch.optim.AdamW
    return Task(
        model=net,
        train_data=TensorDataset(x, torch.arange(64) % 3),
        loss=loss,
        optimizer=lambda model: make(model.parameters(), lr=1e-3),
        global_batch=32,
        micro_batch=4,
    )
