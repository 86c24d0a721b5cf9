"""What every way to take a training step is given: the same few windows of a task, fetched and
weighed before any clock runs.

A window's weight stands here because torch's DDP averages over ranks: a loop around it can make the
update of the whole global batch only if the sum of all weights is known before the first backward.
Ours sends it along; here it is handed to the others for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.config.task import Precision, Task
from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.runtime import randomness
from lockstep.step.forward import Forward
from lockstep.training.build import loader_of, model_of
from lockstep.world.world import World

WINDOWS = 4
"""Windows that the turns go round in: other data from step to step, and all of it fits into
memory.
"""


@dataclass(frozen=True, slots=True)
class WeighedWindow:
    """One window, as one rank is given it."""

    window: Window
    batches: list[Any]
    """This rank's micro-batches, at least one."""
    own: float
    """The weight of this rank's micro-batches."""
    whole: float
    """The weight of all ranks' micro-batches."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Windows in turn, and what is known of the task's steps."""

    given: Sequence[WeighedWindow]
    draws: bool
    """Whether a forward or its loss draws random numbers, as dropout does."""
    recipe: str
    """How the global batch is cut and shared, in words."""


def feed(task: Task, precision: Precision, world: World, *, weighed: bool = True) -> Feed:
    """Fetch and weigh: all ranks call it. Not `weighed`, a window weighs what it holds of samples,
    and no model is built.

    Raises UsageError, on all ranks alike, where some rank has no micro-batch: torch's DDP would
    wait for it for ever.
    """
    loader = loader_of(task, world)
    windows = list(_like_the_first(loader, world))
    if not windows:
        raise too_few(task, world.size)
    draws, own = False, [float(window.samples) for window in windows]
    if weighed:
        draws, own = _weigh(task, precision, world, windows)
    whole = torch.tensor(own, dtype=torch.float64)
    world.control.all_reduce(whole).wait()
    if not all(weight > 0 for weight in whole.tolist()):
        raise UsageError("window-without-weight", task=task.name, weight=min(whole.tolist()))
    given = [
        WeighedWindow(window, list(window), mine, all_)
        for window, mine, all_ in zip(windows, own, whole.tolist(), strict=True)
    ]
    return Feed(given, world.agree(draws), loader.describe())


def too_few(task: Task, workers: int) -> UsageError:
    """Of a task that leaves ranks without micro-batches."""
    return UsageError(
        "fewer-micro-batches-than-ranks",
        task=task.name,
        workers=workers,
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
    )


def _like_the_first(loader: Any, world: World) -> Iterator[Window]:
    """Up to WINDOWS windows of the first epoch in which every rank has as many micro-batches as
    in the first, and at least one.
    """
    found = 0
    most = None
    for window in next(loader.epochs(1)):
        most = len(window) if most is None else most
        if world.agree(len(window) == most > 0, "all"):
            list(window)  # fetched while the loader is there
            yield window
            found += 1
        if found == WINDOWS:
            return


def _weigh(
    task: Task, precision: Precision, world: World, windows: list[Window]
) -> tuple[bool, list[float]]:
    """Whether something is drawn, and the weight of each window's micro-batches on this rank.
    The model is one of its own, and goes.
    """
    randomness.shared(task.seed)
    forward = Forward(model_of(task).to(world.device), task, precision, world.device)
    before = _random_states(world.device)
    weights = []
    with torch.no_grad():
        for window in windows:
            weights.append(sum(float(forward.loss(forward(batch), batch)[1]) for batch in window))
    return _random_states(world.device) != before, weights


def _random_states(device: torch.device) -> tuple[object, ...]:
    numpys: Any = np.random.get_state(legacy=True)
    states = [torch.get_rng_state()] + (
        [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    )
    return (
        random.getstate(),
        numpys[1].tobytes(),
        numpys[2],
        *(state.numpy().tobytes() for state in states),
    )
