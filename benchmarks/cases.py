"""Models with made-up data that benchmarks measure, as tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from baselines import WINDOWS

Samples = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (
            self.attend(self.norms[0](x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.feed(self.norms[1](x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 384)
        self.blocks = nn.Sequential(*[Block(384, 6) for _ in range(6)])
        self.head = nn.Linear(384, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(x)))
        return logits


def perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp() -> nn.Module:
    return perceptron(1024, 3072, 3072, 3072, 1024)


def small_mlp() -> nn.Module:
    """24 MiB of gradients."""
    return perceptron(1024, 2048, 2048, 16, 1024)


def convolutions(*widths: int) -> list[nn.Module]:
    """The first at full size, each of the others at half of the one before, until 4 x 4."""
    layers: list[nn.Module] = []
    for place, (inside, outside) in enumerate(zip((3, *widths[:-1]), widths, strict=True)):
        stride = 2 if 0 < place < 4 else 1
        layers += [
            nn.Conv2d(inside, outside, 3, padding=1, stride=stride, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
        ]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def cnn() -> nn.Module:
    return nn.Sequential(*convolutions(16, 32, 64, 128), nn.Linear(128, 10))


def cnn4() -> nn.Module:
    """4 MiB of gradients."""
    return nn.Sequential(
        *convolutions(32, 64, 128, 256, 256), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    samples: Samples
    batch: int
    """Samples of a rank's step."""


def rows(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1024, generator=g), torch.randint(0, 1024, (count,), generator=g)


def texts(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (count, 64), generator=g), torch.randint(
        0, 256, (count, 64), generator=g
    )


def images(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32, generator=g), torch.randint(0, 10, (count,), generator=g)


CASES = {
    "mlp": Case(mlp, rows, 32),
    "mlp128": Case(mlp, rows, 128),
    "small-mlp": Case(small_mlp, rows, 32),
    "small-mlp128": Case(small_mlp, rows, 128),
    "transformer": Case(Transformer, texts, 4),
    "cnn": Case(cnn, images, 32),
    "cnn4": Case(cnn4, images, 32),
}


class Compilable(nn.Module):
    """torch.compile leaves a bare nn.Sequential alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Of classes [batch, classes], or of bytes [batch, length, 256]."""
    return (
        F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="sum"),
        batch[1].numel(),
    )


def task_of(name: str, workers: int, compiled: bool) -> lockstep.Task:
    """The case as a task in which every rank has one micro-batch a step."""
    case = CASES[name]
    return lockstep.Task(
        name=name,
        model=lambda: Compilable(case.model()),
        train_data=TensorDataset(
            *case.samples(WINDOWS * workers * case.batch, torch.Generator().manual_seed(0))
        ),
        loss=loss,
        optimizer=optimizer,
        global_batch=workers * case.batch,
        micro_batch=case.batch,
        compile=compiled,
    )
