"""Small models with everything that makes gradients awkward, and data for them. Shared by tests;
nothing here is random at import.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Awkward(nn.Module):
    """Tied weights, a scalar, a frozen layer, a non-contiguous parameter and one that gets no
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.inner.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(3, 6).t())
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.frozen(self.inner(x)))) * self.scale @ self.turned


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3)
    )


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x.view(-1, 1, 2, 3)))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 8, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(x.view(-1, 3, 2))[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "awkward": Awkward,
    "mlp": mlp,
    "cnn": Convolutional,
    "rnn": Recurrent,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]()


def samples(count: int) -> tuple[Tensor, Tensor]:
    """Inputs [count, 6] and classes [count], all different."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(count, 6, generator=generator), torch.randint(
        0, 3, (count,), generator=generator
    )


def batch(rank: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """Four samples, others for each rank and number, of up to four ranks."""
    x, y = samples(512)
    start = 4 * (4 * number + rank)
    return x[start : start + 4], y[start : start + 4]


def weights(*models: nn.Module) -> list[Tensor]:
    """Copies."""
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def loss_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in float64; 0 where both are 0."""
    a, b = a.double(), b.double()
    gap = torch.linalg.vector_norm(a - b).item()
    return gap if gap == 0 else gap / max(torch.linalg.vector_norm(b).item(), 1e-30)
