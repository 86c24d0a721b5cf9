"""Models that are cut in tests, made so that a wrong cut is seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn


class Block(nn.Module):
    """A residual connection inside: a layer that cannot be cut."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inside = nn.Sequential(
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inside(self.norm(x))
        return out


class Turned(nn.Module):
    """A view that is not contiguous, and so are gradients that come through it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(-1, -2)


class Halves(nn.Module):
    """Gives two tensors, as recurrent layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :1], x[:, 1:]


class Reader(nn.Module):
    """Token ids [batch, length] -> [batch, 5, length], with operations between modules."""

    def __init__(
        self, depth: int = 6, width: int = 6, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.places = nn.Embedding(7, width)
        self.blocks = nn.Sequential(*[Block(width, dropout) for _ in range(depth)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.head = nn.Linear(width, 11 if tied else 5, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.words(ids) + self.places(places)) * self.scale
        out: Tensor = self.head(x).transpose(1, 2)
        return out


def reader(**options: int | float | bool) -> Reader:
    """The same weights on every rank, in float64."""
    torch.manual_seed(3)
    return Reader(**options).double()  # type: ignore[arg-type]


def sentences(count: int, last: int = 3, length: int = 4) -> list[tuple[Tensor]]:
    """Micro-batches of 3 sentences each, other ones in each, the last of `last`."""
    draw = torch.Generator().manual_seed(5)
    sizes = [3] * (count - 1) + [last] if count else []
    return [(torch.randint(0, 11, (size, length), generator=draw),) for size in sizes]


@contextmanager
def objects_refused() -> Iterator[None]:
    """Functions of torch that would pickle objects for other ranks fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an object was sent to another rank")

    names = [name for name in dir(dist) if "object" in name and callable(getattr(dist, name))]
    assert "send_object_list" in names
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, refuse)
            patch.setattr(dist.distributed_c10d, name, refuse)
        yield
