"""Two ranks with half the batch each do not train what one process trains.

https://github.com/Lightning-AI/pytorch-lightning/issues/6789

Lightning's DDP shuffles in another order than one process does. Of 83 samples it also trains one
twice, to have equally many on both ranks. The weights differ after two epochs.

The lines: `Batches(lockstep.Loader(data, global_batch=8))` for the DataLoader and
`strategy="lockstep"`. Each step has the same samples, and the mean is over all of them.

    lockstep run --workers 2 examples/upstream/lightning_6789.py
"""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.integrations.lightning import Batches

INPUTS = torch.randn(83, 10, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True).sin())
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = dict.fromkeys(OFF, False)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def weights(loader: Any, strategy: str, devices: int) -> Tensor:
    net = Net()
    pl.Trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        accelerator="cpu",
        **QUIET,
    ).fit(net, loader)
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def before(world: lockstep.World) -> str:
    alone = weights(DataLoader(DATA, batch_size=8, shuffle=True), "auto", 1)
    together = weights(DataLoader(DATA, batch_size=4, shuffle=True), "ddp", 2)
    return f"weights of 2 ranks and of 1 differ by {(together - alone).abs().max():.3f}"


def after(world: lockstep.World) -> str:
    alone = weights(Batches(lockstep.Loader(DATA, global_batch=8, rank=0, size=1)), "auto", 1)
    together = weights(Batches(lockstep.Loader(DATA, global_batch=8)), "lockstep", 2)
    return f"weights of 2 ranks and of 1 differ by {(together - alone).abs().max():.3f}"


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with lockstep.init() as world:
        for half in (before, after):
            line = half(world)
            if world.rank == 0:
                print(f"{half.__name__}: {line}")
