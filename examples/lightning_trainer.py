"""Lightning's Trainer on Lockstep: the same weights with any number of workers, and a resume in the
middle of an epoch.

    lockstep run --workers 2 examples/lightning_trainer.py

The first fit stops after 10 steps, in the middle of the second epoch. The second resumes there, in
place of a job that was killed, and ends with the weights of a fit that was never interrupted.
"""

import logging
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.integrations.lightning import Batches, LockstepCheckpointIO


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Batches:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(500, 10, generator=generator)
        data = TensorDataset(inputs, inputs[:, :5].sum(1, keepdim=True).sin())
        return Batches(lockstep.Loader(data, global_batch=64, seed=0))  # 8 steps, the last of 52


def fitted(steps: int, *, resume: str | None = None) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy="lockstep",
        accelerator="cpu",
        plugins=[LockstepCheckpointIO()],
        max_steps=steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Net(), ckpt_path=resume)
    return trainer


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    whole = fitted(24).lightning_module
    first = fitted(10)
    folder = first.strategy.broadcast(tempfile.mkdtemp())
    first.save_checkpoint(f"{folder}/step=10.ckpt")
    second = fitted(24, resume=f"{folder}/step=10.ckpt")
    both = zip(whole.parameters(), second.lightning_module.parameters(), strict=True)
    equal = all(torch.equal(one, other) for one, other in both)
    if second.is_global_zero:
        print(f"{second.world_size} ranks, {second.global_step} steps: {equal=}")
        print(f"weights {sum(each.double().sum() for each in whole.parameters()):.5f}")


if __name__ == "__main__":
    main()
