"""A small task for replays: one sample may have a wrong scale, and after one step a bit of a weight
may flip.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep

SAMPLES = 44
BAD = 29
FLIP = "LOCKSTEP_TEST_FLIP_AFTER"  # variable: the step after which the bit flips, in training only


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, bad: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = self.x[:, :3].argmax(1)
        if bad >= 0:
            self.y[bad] = self.x[bad, :3].argmin()
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index] + 0.01 * torch.randn(6)  # drawn from the sample's stream
        return (x * 1e4 if index == self.bad else x), self.y[index]


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def task(bad: int = -1, norm: bool = False, lr: float = 0.05) -> lockstep.Task:
    models: list[nn.Module] = []

    def model() -> nn.Module:
        middle = nn.BatchNorm1d(8) if norm else nn.ReLU()
        net = nn.Sequential(nn.Linear(6, 8), middle, nn.Dropout(0.3), nn.Linear(8, 3))
        models.append(net)
        return net

    def on_step(record: Mapping[str, Any]) -> None:
        if str(record["step"]) == os.environ.get(FLIP):
            weight = next(models[-1].parameters()).detach().reshape(-1)
            weight[:1].view(torch.int32).bitwise_xor_(1 << 29)

    return lockstep.Task(
        model=model,
        train_data=Samples(bad),
        loss=loss,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9),
        global_batch=16,
        micro_batch=4,
        epochs=5,
        clip=0.1,
        eval_data=Samples(-1),
        scheduler=lambda optimizer, epochs: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        scheduler_per="epoch",
        on_step=on_step,
        describe=lambda sample: f"class {int(sample[1])}",
    )
