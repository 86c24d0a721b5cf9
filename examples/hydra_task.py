"""A task from a configuration that Hydra composes: conf/config.yaml and the groups beside it.

    lockstep train hydra_task.py --workers 2 --set cfg=conf/config.yaml
    lockstep train hydra_task.py --workers 2 --set cfg=conf/config.yaml \
        --set cfg.optimizer=adamw --set cfg.model.width=64

A multirun trains each combination in its own folder of the run directory:

    lockstep train hydra_task.py --workers 2 --set cfg=conf/config.yaml --run runs/sweep \
        --multirun cfg.optimizer=sgd,adamw --multirun cfg.model.width=16,32
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

import lockstep


def points(count: int, seed: int) -> TensorDataset:
    """Points in the plane, and in which of three rings each lies."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(x, (x.norm(dim=1) * 2.2).long().clamp(max=2))


def loss(output: Tensor, batch: Any) -> tuple[Tensor, float]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def metrics(output: Tensor, batch: Any) -> dict[str, tuple[Tensor, float]]:
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}


def task(cfg: DictConfig) -> lockstep.Task:
    width, dropout = cfg.model.width, cfg.model.dropout

    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(2, width), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)),
        )

    def optimizer(model: nn.Module) -> Optimizer:
        chosen = cfg.optimizer
        if chosen.name == "adamw":
            return AdamW(model.parameters(), lr=chosen.lr, weight_decay=chosen.weight_decay)
        return SGD(model.parameters(), lr=chosen.lr, momentum=0.9)

    return lockstep.Task(
        model=model,
        train_data=points(600, seed=0),
        eval_data=points(200, seed=1),
        loss=loss,
        metrics=metrics,
        optimizer=optimizer,
        global_batch=60,
        micro_batch=15,
        epochs=cfg.epochs,
    )
