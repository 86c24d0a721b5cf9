"""A task with one mistake in it, of the kind that makes a training depend on how it is run. The
tests copy this file and train it.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lockstep import Task

SAMPLES = 24
# WHERE own: drawn from on this rank only, so that it follows the rank's micro-batches
own = random.Random(5)
own_torch = torch.Generator().manual_seed(5)
NAMES = {"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"}


class Data(Dataset[Any]):
    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        # WHERE constructor
        self.rank = int(os.environ["RANK"]) if fault == "rank in the data set's constructor" else 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = self.x[index]
        if self.fault == "rank in the samples":
            x = x + int(os.environ["RANK"])  # WHERE rank in the samples
        if self.fault == "sample edited":
            x -= 0.1
        if self.fault == "samples of an own generator":
            x = x + np.random.default_rng().random()  # WHERE default_rng
        if self.fault == "all samples seeded alike":
            torch.manual_seed(7)
        if self.fault in ("all samples seeded alike", "noise"):
            x = x + torch.randn(6)
        return (x + self.rank if self.rank else x), index % 3


class Net(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        if fault == "start":
            # WHERE start
            nn.init.normal_(self.last.bias, generator=torch.Generator().manual_seed(time.time_ns()))

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "dropout by rank":
            torch.manual_seed(torch.distributed.get_rank())  # WHERE dropout
        if self.fault == "clock":
            torch.manual_seed(int(time.time() * 1e6))  # WHERE clock
        x = F.dropout(F.relu(self.first(x)), 0.5)
        if self.fault == "threads":
            x = x * (1 + torch.get_num_threads())  # WHERE threads
        if self.fault == "world size":
            x = x / torch.distributed.get_world_size()  # WHERE world size
        if self.fault == "counter":
            self.calls += 1
            x = x * self.calls
        if self.fault == "set":
            for number, name in enumerate(NAMES):
                x = x + 1e-5 * number * (31 * ord(name[0]) + ord(name[-1]))
        return self.last(x)


class Scaled(torch.autograd.Function):
    """The identity, whose gradient has noise of its own."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * own.random()


def first_of(samples: list[Any]) -> Any:
    """The data set's own memory: nothing is copied."""
    return samples[0][0].unsqueeze(0), torch.tensor([samples[0][1]])


def task(fault: str = "") -> Task:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        if fault == "nondeterministic backward":
            output = Scaled.apply(output)
        found = F.cross_entropy(output, batch[1], reduction="sum")
        if fault == "random.random":
            found = found * random.random()
        if fault == "own generator":
            found = found * (1 + own.random())  # WHERE own generator
        if fault == "own torch generator":
            found = found * (1 + torch.rand((), generator=own_torch))
        if fault == "batch edited":
            batch[0].mul_(0.5)
        return found, len(batch[1])

    edited = fault == "batch edited"  # by the loss, after the model's clone of it
    return Task(
        model=lambda: Net(fault),
        train_data=Data(fault),
        loss=loss,
        inputs=(lambda batch: (batch[0].clone(),)) if edited else (lambda batch: (batch[0],)),
        collate=first_of if edited else None,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=4 if edited else 8,
        micro_batch=1 if edited else 2,
    )
