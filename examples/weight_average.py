"""Averages of the weights: EMA after every step, or SWA over the last epochs.

    lockstep train examples/weight_average.py --workers 2 --exact
    lockstep train examples/weight_average.py --workers 2 --exact --set average=swa

The average is evaluated in the model's place, and checkpoints keep it: a run that was killed resumes
with it on any number of workers. `lockstep checkpoints export RUN --average --out FILE` copies it.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import lockstep


def data(count: int, seed: int) -> TensorDataset:
    """Two noisy spirals."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 6 * radius + torch.pi * label
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return TensorDataset(x + 0.05 * torch.randn(count, 2, generator=generator), label)


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)),
    )


def ema(model: nn.Module) -> AveragedModel:
    """With BatchNorm's statistics averaged in the same way (`use_buffers`)."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)


def swa(model: nn.Module) -> AveragedModel:
    """All averaged epochs count alike."""
    return AveragedModel(model, use_buffers=True)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def metrics(output: Tensor, batch: Any) -> dict[str, tuple[Tensor, int]]:
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}


def task(average: Literal["ema", "swa", "none"] = "ema", swa_after: int = 4) -> lockstep.Task:
    choices: dict[str, dict[str, Any]] = {
        "ema": {"average": ema},
        "swa": {
            "average": swa,
            "average_per": "epoch",
            "average_after": swa_after,
            "scheduler": lambda optimizer, epochs: SWALR(optimizer, swa_lr=0.05, anneal_epochs=4),
            "scheduler_per": "epoch",
        },
        "none": {},
    }
    return lockstep.Task(
        model=net,
        train_data=data(1024, seed=0),
        eval_data=data(512, seed=1),
        loss=loss,
        metrics=metrics,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        global_batch=64,
        micro_batch=16,
        epochs=8,
        **choices[average],
    )
