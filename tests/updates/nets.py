"""The model that tests of updates train, its data, and its optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Net(nn.Module):
    """A scalar, a tied, a frozen and a channels_last parameter, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 17, 3, padding=1).to(memory_format=torch.channels_last)
        self.first = nn.Linear(17 * 16, 97)
        self.tied = nn.Linear(97, 97, bias=False)
        self.again = self.tied
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(97), requires_grad=False)
        self.head = nn.Linear(97, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu().flatten(1)
        x = self.again(self.tied(self.first(x)).relu() + self.frozen) * self.scale
        y: Tensor = self.head(x)
        return y


def batch(rank: int, step: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and classes; by default of 1 to 3 rows, another number on every rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 1 + (rank + step) % 3 if rows is None else rows
    x = torch.randn(rows, 3, 4, 4, generator=generator)
    return x, torch.randint(0, 5, (rows,), generator=generator)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two, with and without decay."""
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in trainable(model) if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(trainable(model), lr=0.1)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2, fused=True)
