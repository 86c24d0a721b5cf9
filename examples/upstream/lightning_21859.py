"""A logged mean is too large where ranks have unequal numbers of batches.

https://github.com/Lightning-AI/pytorch-lightning/issues/21859 (and 21838, its first report)

`self.log(..., sync_dist=True)` divides the mean of the ranks' sums by the mean of their counts.
With gloo that mean is a whole number: of 3 and 2 batches it is 2, not 2.5.

The line: `Trainer(strategy=LockstepStrategy())` for `strategy="ddp"`. Its mean of whole numbers keeps the
fraction.

    lockstep run --workers 2 examples/upstream/lightning_21859.py
"""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.integrations.lightning import LockstepStrategy

VALUES = ([0.0, 1.0, 2.0], [3.0, 4.0])  # of each rank; their mean is 2
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = dict.fromkeys(OFF, False)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("value", batch[0].mean(), on_epoch=True, sync_dist=True, batch_size=len(batch[0]))


def logged(strategy: Any, rank: int) -> str:
    trainer = pl.Trainer(
        strategy=strategy,
        devices=2,
        use_distributed_sampler=False,  # each rank has data of its own
        accelerator="cpu",
        **QUIET,
    )
    data = DataLoader(TensorDataset(torch.tensor(VALUES[rank])))
    (found,) = trainer.validate(Net(), data, verbose=False)
    return f"the mean of 0, 1, 2 and 3, 4 is logged as {found['value']:.3f}"


def before(world: lockstep.World) -> str:
    return logged("ddp", world.rank)


def after(world: lockstep.World) -> str:
    return logged(LockstepStrategy(), world.rank)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with lockstep.init() as world:
        for half in (before, after):
            line = half(world)
            if world.rank == 0:
                print(f"{half.__name__}: {line}")
