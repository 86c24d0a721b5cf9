"""A task of its own for benchmarks/plan.py: a perceptron of 2.4 million parameters on random
numbers, so that gradients weigh more than computation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def task(
    *,
    width: int = 1024,
    samples: int = 4096,
    global_batch: int = 512,
    micro_batch: int = 64,
    epochs: int = 1000,
) -> lockstep.Task:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(samples, 256, generator=generator),
        torch.randint(10, (samples,), generator=generator),
    )
    return lockstep.Task(
        name="mlp",
        model=lambda: model(width),
        train_data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        global_batch=global_batch,
        micro_batch=micro_batch,
        epochs=epochs,
    )
