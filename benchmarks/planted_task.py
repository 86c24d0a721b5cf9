"""A task in which one rank is slow on purpose, at one place: attribution.py trains it, and reads
what the verdict says.

lockstep train benchmarks/planted_task.py --workers 4 --set where=backward --set rank=2 --set
seconds=0.2
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lockstep import Task
from lockstep.runtime.environment import placement

PLACES = ("nowhere", "loader", "forward", "backward", "optimizer")
_SAMPLES, _FEATURES, _CLASSES = 4096, 64, 10
_HIDDEN = 280  # some 40,000 parameters: a ring of 4 sends 240 kB a step
_GLOBAL, _MICRO = 64, 8


class Digits(Dataset[tuple[Tensor, int]]):
    """Random vectors and labels; each sample takes so many seconds to fetch."""

    def __init__(self, seconds: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(_SAMPLES, _FEATURES, generator=generator)
        self._y = torch.randint(0, _CLASSES, (_SAMPLES,), generator=generator).tolist()
        self._seconds = seconds

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._seconds:
            time.sleep(self._seconds)
        return self._x[index], self._y[index]


class _Late(torch.autograd.Function):
    """Passes on what comes, its gradient after so many seconds."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


class Net(nn.Module):
    """Slow by so many seconds a micro-batch."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(_FEATURES, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, 72),
            nn.ReLU(),
            nn.Linear(72, _CLASSES),
        )
        self._forward_seconds, self._backward_seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        if self._forward_seconds:
            time.sleep(self._forward_seconds)
        found: Tensor = self.layers(x)
        return _Late.apply(found, self._backward_seconds) if self._backward_seconds else found  # type: ignore[no-untyped-call]


class SlowAdamW(torch.optim.AdamW):
    """Slow by `dawdles` seconds a step."""

    dawdles = 0.0

    def step(self, closure: Any = None) -> Any:
        if self.dawdles:
            time.sleep(self.dawdles)
        return super().step(closure)


def task(where: str = "nowhere", rank: int = 0, seconds: float = 0.2) -> Task:
    """`seconds` a step on that rank."""
    if where not in PLACES:
        raise ValueError(f"where={where!r}: choose one of {', '.join(PLACES)}")
    found = placement(os.environ)
    mine, size = (0, 1) if found is None else (found.rank, found.size)
    slow = {place: seconds if place == where and mine == rank else 0.0 for place in PLACES}
    micro_batches = _GLOBAL // _MICRO // size

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = SlowAdamW(model.parameters(), lr=1e-3)
        made.dawdles = slow["optimizer"]
        return made

    return Task(
        name="planted",
        model=lambda: Net(slow["forward"] / micro_batches, slow["backward"] / micro_batches),
        train_data=Digits(slow["loader"] / (_GLOBAL // size)),
        loss=lambda output, batch: (
            F.cross_entropy(output, batch[1], reduction="sum"),
            len(batch[1]),
        ),
        optimizer=optimizer,
        global_batch=_GLOBAL,
        micro_batch=_MICRO,
    )
