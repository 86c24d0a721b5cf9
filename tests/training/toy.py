"""A task small enough to be trained in a test, with what makes training depend on care:
BatchNorm, dropout, ragged tails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Task, World

R = TypeVar("R")

SAMPLES, HELD_OUT = 44, 21


def data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(F.relu(self.norm(self.first(x)))))
        return out


def net() -> Net:
    """The same weights at each call."""
    torch.manual_seed(3)
    return Net()


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def metrics(output: Tensor, batch: Any) -> dict[str, tuple[Tensor, int]]:
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def task(**changes: Any) -> Task:
    """11 samples a step in micro-batches of 4 (the last of 3): 4 steps an epoch."""
    fields: dict[str, Any] = {
        "name": "toy",
        "model": Net,
        "train_data": data(SAMPLES, 1),
        "eval_data": data(HELD_OUT, 2),
        "loss": loss,
        "metrics": metrics,
        "optimizer": sgd,
        "global_batch": 11,
        "micro_batch": 4,
        "epochs": 2,
    }
    return Task(**{**fields, **changes})


def alone(fn: Callable[Concatenate[World, ...], R], *args: Any, **kwargs: Any) -> R:
    """Run `fn(world, ...)` in this process, with one intra-op thread as a rank has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with lockstep.init(backend="gloo") as world:
            return fn(world, *args, **kwargs)
    finally:
        torch.set_num_threads(before)


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind in a run's metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


def by_hand(
    epochs: int = 2,
    *,
    exact: bool = False,
    after_step: Callable[[nn.Module], object] = lambda model: None,
    after_epoch: Callable[[nn.Module, int], object] = lambda model, epoch: None,
) -> nn.Module:
    """The loop that a user would write in an open world, without `lockstep.train`."""
    lockstep.seed(0)
    model = Net()
    stepper = lockstep.Stepper(model, sgd(model), exact=exact)
    loader = lockstep.Loader(data(SAMPLES, 1), global_batch=11, micro_batch=4, seed=0)
    for epoch in loader.epochs(epochs):
        for window in epoch:
            for batch in stepper.micro_batches(window):
                stepper.backward(*loss(model(batch[0]), batch))
            stepper.step()
            after_step(model)
        after_epoch(model, epoch.number)
    return model
