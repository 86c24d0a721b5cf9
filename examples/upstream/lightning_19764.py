"""A fit that resumes in the middle of an epoch begins the epoch's data again.

https://github.com/Lightning-AI/pytorch-lightning/issues/19764

A checkpoint of Lightning holds the step but no place in the data. After a resume some samples of
the epoch are trained twice, and as many never.

The line: `Batches(lockstep.Loader(data, global_batch=8))` for the DataLoader. Its place is saved
with each checkpoint; here one rank resumes what two have saved.

    lockstep run --workers 2 examples/upstream/lightning_19764.py
"""

import logging
import tempfile
import warnings
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.integrations.lightning import Batches

DATA = TensorDataset(torch.arange(64.0)[:, None])
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = dict.fromkeys(OFF, False)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.net, self.seen = nn.Linear(1, 1), list[int]()

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        self.seen += batch[0].flatten().int().tolist()
        return nn.functional.mse_loss(self.net(batch[0] / 64), batch[0] / 64)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(loader: Any, file: str, *, strategy: str, devices: int, resume: bool) -> list[int]:
    """Three steps and a checkpoint; or from the checkpoint to the end of the epoch, step 8."""
    net = Net()
    trainer = pl.Trainer(
        strategy=strategy,
        devices=devices,
        max_steps=8 if resume else 3,
        accelerator="cpu",
        **QUIET,
    )
    trainer.fit(net, loader, ckpt_path=file if resume else None)
    if not resume:
        trainer.save_checkpoint(file)
    return net.seen


def everyone(mine: list[int]) -> list[int]:
    return list(lockstep.collectives.all_gather(torch.tensor(mine)).tolist())


def described(seen: list[int]) -> str:
    times = Counter(seen)
    twice = sum(count > 1 for count in times.values())
    return f"{twice} of 64 samples trained twice, {64 - len(times)} never"


def before(world: lockstep.World, file: str) -> str:
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    done = fit(loader, file, strategy="ddp", devices=2, resume=False)
    rest = fit(loader, file, strategy="ddp", devices=2, resume=True)
    return described(everyone(done + rest))


def after(world: lockstep.World, file: str) -> str:
    loader = Batches(lockstep.Loader(DATA, global_batch=8))
    done = fit(loader, file, strategy="lockstep", devices=2, resume=False)
    loader = Batches(lockstep.Loader(DATA, global_batch=8, rank=0, size=1))
    rest = fit(loader, file, strategy="auto", devices=1, resume=True)  # one process alone
    return described(everyone(done) + rest)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with lockstep.init() as world, tempfile.TemporaryDirectory() as own:
        folder = [own]
        torch.distributed.broadcast_object_list(folder)
        for half in (before, after):
            line = half(world, f"{folder[0]}/{half.__name__}.ckpt")
            if world.rank == 0:
                print(f"{half.__name__}: {line}")
        world.barrier()
