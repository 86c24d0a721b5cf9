"""A script with @hydra.main, whose ranks would each take a directory of their own: it names the
rank. Started by a launcher it is one rank; else it starts two.
"""

from __future__ import annotations

import os
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def train(cfg: DictConfig, run: Path) -> str:
    """The digest of the trained weights."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    task = lockstep.Task(
        model=lambda: nn.Linear(4, 1),
        train_data=TensorDataset(x, x.sum(1, keepdim=True)),
        loss=lambda output, batch: ((output - batch[1]).square().sum(), len(output)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=cfg.optimizer.lr),
        global_batch=8,
        micro_batch=2,
    )
    return lockstep.train(task, run=run, exact=True).sha256


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> None:
    run = Path(HydraConfig.get().runtime.output_dir) / "run"
    if "RANK" in os.environ:
        (Path.cwd() / f"rank-{os.environ['RANK']}").write_text(train(cfg, run))
    else:
        for rank, digest in enumerate(lockstep.launch(train, 2, (cfg, run))):
            (Path.cwd() / f"rank-{rank}").write_text(digest)


if __name__ == "__main__":
    main()
