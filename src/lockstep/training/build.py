"""Build the model, the optimizer, the scheduler and the Loader of a task. Each object that a task's
function returns is checked once, here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import BatchSampler

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.data.loader import Loader
from lockstep.data.orders import Batches
from lockstep.errors import TaskError
from lockstep.runtime import randomness
from lockstep.training.resolve import wrong_type
from lockstep.world.world import World


@dataclass(frozen=True, slots=True)
class Length:
    """The planned length of a training. The epochs of a stream have no known length: then one of
    the two is None.
    """

    epochs: int | None
    steps: int | None

    @classmethod
    def of(cls, task: Task, settings: Settings, steps_per_epoch: int | None) -> Length:
        """`settings.steps` has priority over `settings.epochs`, which has priority over the task's
        epochs. An incomplete epoch counts as one.
        """
        if settings.steps is None:
            epochs = settings.epochs or task.epochs
            return cls(epochs, None if steps_per_epoch is None else epochs * steps_per_epoch)
        if steps_per_epoch is None:
            return cls(None, settings.steps)
        return cls(math.ceil(settings.steps / steps_per_epoch), settings.steps)

    @property
    def of_steps(self) -> str:
        """Text that follows a number of steps: " of 100", or "" if the total is unknown."""
        return "" if self.steps is None else f" of {self.steps}"


def loader_of(
    task: Task,
    world: World,
    loader_workers: int = 0,
    share: tuple[int, int] | None = None,
    balance: str | None = None,
    *,
    drop_last: bool = False,
) -> Loader:
    """Return this rank's Loader of the training data. `share`: (number, count) of the share that
    this rank computes, if there are fewer shares than ranks.
    """
    number, shares = share or (world.rank, world.size)
    order = task.order(task.train_data) if task.order is not None else None
    sizes: dict[str, Any] = {"global_batch": task.global_batch, "micro_batch": task.micro_batch}
    if isinstance(order, Batches | BatchSampler):
        sizes = {"micro_batches": -(-task.global_batch // task.micro_batch)}
    return Loader(
        task.train_data,
        order=order,
        shuffle=task.shuffle,
        **sizes,
        seed=task.seed,
        num_workers=loader_workers,
        drop_last=drop_last,
        collate_fn=task.collate,
        device=world.device,
        rank=number,
        size=shares,
        balance=balance,
    )


def model_of(task: Task) -> nn.Module:
    """Build the model under the shared random stream, so that it is equal on all ranks. With
    `init_seed` torch draws what it draws after torch.manual_seed.
    """
    randomness.shared(task.seed)
    if task.init_seed is not None:
        torch.manual_seed(task.init_seed)
    model = task.model()
    if not isinstance(model, nn.Module):
        raise wrong_type("Task: model", model, "a torch.nn.Module")
    return model


def optimizer_of(task: Task, model: nn.Module) -> Optimizer:
    optimizer: Any = task.optimizer(model)
    if isinstance(optimizer, (tuple, list, dict)):
        raise TaskError("several-optimizers", type=type(optimizer).__name__)
    if not isinstance(optimizer, Optimizer):
        raise wrong_type("Task: optimizer", optimizer, "a torch.optim.Optimizer")
    return optimizer


def scheduler_of(task: Task, optimizer: Optimizer, length: Length) -> LRScheduler | None:
    if task.scheduler is None:
        return None
    if task.scheduler_per == "step":
        times = length.steps
        fix = "give --steps"
    else:
        times = length.epochs
        fix = "give --epochs in place of --steps"
    if times is None:
        raise TaskError("schedule-length-unknown", per=task.scheduler_per, fix=fix)
    scheduler = task.scheduler(optimizer, times)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        expected = "a torch.optim.lr_scheduler.LRScheduler that steps without a metric"
        raise wrong_type("Task: scheduler", scheduler, expected)
    return scheduler
