"""Gradient checkpointing: activations are computed again in the backward, in place of being kept.

    lockstep train examples/gradient_checkpointing.py --workers 2 --exact
    lockstep train examples/gradient_checkpointing.py --workers 2 --exact --set checkpointing=false

Both print the same SHA-256: the recomputation draws the same dropout masks as the forward.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()),
            *(nn.Linear(4 * width, width), nn.Dropout(0.2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Net(nn.Module):
    def __init__(self, width: int, depth: int, checkpointing: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 4)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            again = self.checkpointing and self.training
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        out: Tensor = self.last(x)
        return out


def data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, x.unfold(1, 4, 4).sum(2).argmax(1))


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def metrics(output: Tensor, batch: Any) -> dict[str, tuple[Tensor, int]]:
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}


def task(checkpointing: bool = True, width: int = 64, depth: int = 6) -> lockstep.Task:
    return lockstep.Task(
        model=lambda: Net(width, depth, checkpointing),
        train_data=data(1024, seed=0),
        eval_data=data(256, seed=1),
        loss=loss,
        metrics=metrics,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
        global_batch=128,
        micro_batch=32,
        epochs=4,
    )
