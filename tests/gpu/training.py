"""A small training on any device, by as many ranks as there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

STEPS = 6


def make_model(device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    # no bias before BatchNorm: its gradient is rounding alone, which Adam makes a step of
    layers = (nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    return nn.Sequential(*layers).to(device)


def samples(count: int = 48) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 16, generator=g), torch.randint(0, 4, (count,), generator=g)
    )


def loader_of(world: lockstep.World, **options: Any) -> lockstep.Loader:
    return lockstep.Loader(
        samples(),
        global_batch=16,
        micro_batch=4,
        device=world.device,
        rank=world.rank,
        size=world.size,
        **options,
    )


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """The host may wait for a GPU nowhere in the block."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


class Training:
    """`STEPS` steps of two epochs; `weights()` are on the CPU."""

    def __init__(
        self, world: lockstep.World, *, fused: bool = False, compiled: str = "", **options: Any
    ) -> None:
        self.model = make_model(world.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)
        self.stepper = lockstep.Stepper(self.model, self.optimizer, world=world, **options)
        self.loader = loader_of(world)
        self.forward = torch.compile(self.model, backend=compiled) if compiled else self.model
        self.losses: list[float] = []
        self._windows = self._all()  # begun with the first step: a state may be loaded before

    def _all(self) -> Iterator[Any]:
        for epoch in self.loader.epochs(2):
            yield from epoch

    def walk(self, steps: int = STEPS) -> Training:
        """Go on until so many steps are done."""
        while self.stepper.steps < steps:
            for batch in self.stepper.micro_batches(next(self._windows)):
                self.micro_batch(*batch)
            self.losses.append(self.stepper.step().loss)
        return self

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(self.forward(x).float(), y, reduction="sum")
        self.stepper.backward(loss, weight=len(y))

    def weights(self) -> dict[str, Tensor]:
        return {name: each.detach().cpu() for name, each in self.model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit by bit."""
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def close(one: dict[str, Tensor], other: dict[str, Tensor], far: float) -> None:
    for name in one.keys() | other.keys():
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=far, msg=name)
