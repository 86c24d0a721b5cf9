"""Turns what `lockstep.benchmark_scaling` is given into a function that can be sent to every rank, and
makes the task there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import Task
from lockstep.errors import TaskError, UsageError
from lockstep.runs import Settings, load_task

Source = Callable[[], Task]
MICRO_BATCH = 32  # samples, if the data set is large enough


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskParts:
    """A function that makes a task from a model, a data set and a loss."""

    model: Any
    """A module, of which every rank gets a copy, or a function that builds a module."""
    dataset: Any
    loss: Callable[[Any, Any], Tensor]
    global_batch: int
    micro_batch: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None

    def __call__(self) -> Task:
        model = self.model
        name = getattr(model, "__name__", "model")
        if isinstance(model, nn.Module):
            name = type(model).__name__
            model = partial(copy.deepcopy, model)
        return Task(
            name=name,
            model=model,
            train_data=self.dataset,
            loss=partial(_summed, self.loss),
            optimizer=self.optimizer or _sgd,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
        )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with a learning rate so low that the loss does not become nan while timing."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def _summed(loss: Callable[[Any, Any], Tensor], output: Any, batch: Any) -> tuple[Tensor, float]:
    """Return the sum of the loss over the batch, and its number of samples. `loss` returns the mean
    over the batch, as torch's criteria do, or one element per sample.
    """
    target = batch[1]
    losses = loss(output, target)
    count = len(target)
    total = losses * count if losses.dim() == 0 else losses.sum()
    return total, float(count)


def _same(task: Task) -> Task:
    return task


def source_of(
    task: Any,
    workers: Sequence[int],
    growth: float,
    overrides: Mapping[str, str] | None,
    parts: Mapping[str, Any],
) -> Source:
    """Return a function that makes the task. `task`: a Task, a name or file, a function that
    returns a Task, or (model, dataset, loss). Only the last allows values in `parts`.

    `growth`: by how much the global batch grows at the largest number of workers. Raises
    UsageError for anything else.
    """
    if overrides and not isinstance(task, str | Path):
        raise UsageError("overrides-without-file", overrides=dict(overrides))
    if isinstance(task, tuple):
        return _from_parts(task, workers, growth, parts)
    for name, value in parts.items():
        if value is not None:
            raise UsageError("not-for-a-task", name=name, value=value)
    if isinstance(task, str | Path):
        path = Path(task).absolute() if Path(task).is_file() else task
        return partial(load_task, Settings(task=str(path), overrides=dict(overrides or {})))
    if isinstance(task, Task):
        return partial(_same, task)
    if not callable(task) or isinstance(task, nn.Module):
        raise UsageError("not-a-task-source", kind=type(task).__name__)
    source: Source = task
    return source


def _from_parts(
    objects: tuple[Any, ...], workers: Sequence[int], growth: float, parts: Mapping[str, Any]
) -> TaskParts:
    if len(objects) != 3:
        raise UsageError("not-model-dataset-loss", given=f"a tuple of {len(objects)}")
    model, dataset, loss = objects
    if not (isinstance(model, nn.Module) or callable(model)) or not callable(loss):
        kinds = f"({type(model).__name__}, ..., {type(loss).__name__})"
        raise UsageError("not-model-dataset-loss", given=kinds)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError("not-map-style", name="dataset", kind=type(dataset).__name__)
    most = max(workers)
    micro_batch = parts["micro_batch"]
    global_batch = parts["global_batch"]
    if micro_batch is None:
        fits = int(len(dataset) // (most * growth))
        if global_batch is not None:
            fits = math.ceil(global_batch / most)
        micro_batch = max(1, min(MICRO_BATCH, fits))
    return TaskParts(
        model=model,
        dataset=dataset,
        loss=loss,
        global_batch=most * micro_batch if global_batch is None else global_batch,
        micro_batch=micro_batch,
        optimizer=parts["optimizer"],
    )


def make_task(source: Source) -> Task:
    """Make the task in this process. Raises TaskError if the function returns something else."""
    task: Any = source()
    if not isinstance(task, Task):
        raise TaskError(
            "wrong-return-type",
            function="the function",
            type=type(task).__name__,
            expected="a lockstep.Task",
        )
    return task
