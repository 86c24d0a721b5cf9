"""Layers that a callback unfreezes in the middle of a fit drift apart between ranks.

https://github.com/Lightning-AI/pytorch-lightning/issues/20340

DDP reduces the gradients of what had `requires_grad` as it was wrapped. `BackboneFinetuning`
unfreezes the backbone later: each rank then trains a backbone of its own.

The line: `Trainer(strategy=LockstepStrategy())` for `strategy="ddp"`. The wrapper looks at each step which
parameters are trained.

    lockstep run --workers 2 examples/upstream/lightning_20340.py
"""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.integrations.lightning import LockstepStrategy

DATA = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(3)))
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = dict.fromkeys(OFF, False)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.backbone, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        output = self.head(self.backbone(batch[0]).tanh())
        return nn.functional.mse_loss(output, torch.zeros_like(output))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def drift(strategy: Any) -> str:
    """Between the ranks' backbones, after two epochs frozen and two unfrozen."""
    net = Net()
    pl.Trainer(
        strategy=strategy,
        devices=2,
        max_epochs=4,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=2)],
        accelerator="cpu",
        **QUIET,
    ).fit(net, DataLoader(DATA, batch_size=8))
    rows = lockstep.collectives.all_gather(net.backbone.weight.detach().reshape(1, -1))
    return f"the ranks' backbones differ by {(rows[0] - rows[1]).abs().max():.4f}"


def before(world: lockstep.World) -> str:
    return drift("ddp")


def after(world: lockstep.World) -> str:
    return drift(LockstepStrategy())


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with lockstep.init() as world:
        for half in (before, after):
            line = half(world)
            if world.rank == 0:
                print(f"{half.__name__}: {line}")
