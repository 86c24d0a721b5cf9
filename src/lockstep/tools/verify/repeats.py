"""What can be done again: build the model, read a micro-batch's samples, run it forward and
backward.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoints.identity import weights
from lockstep.config.settings import Settings
from lockstep.config.task import Precision, Task
from lockstep.data.device import to_device
from lockstep.data.keyed import KeyedDataset
from lockstep.runtime import randomness
from lockstep.step.forward import Forward
from lockstep.tools.verify.compare import Difference, alike, tolerance_at
from lockstep.tools.verify.trace import Slot, digest_of, sketch
from lockstep.tools.verify.tracing import Traced
from lockstep.training.build import model_of
from lockstep.world.world import World


@dataclass(frozen=True, slots=True)
class Repeat:
    """One thing, under one circumstance."""

    run: Callable[[], Any]
    """Do it, and return what came out."""
    alike: Callable[[Any, Any], bool] = operator.eq
    after_forward: Callable[[], Any] | None = None
    """What comes out when the model and the loss have had a turn in between, where that is
    asked.
    """


Make = Callable[[Task, World], Repeat]
"""From a task that was just loaded."""


def prepared(task: Task, settings: Settings, difference: Difference, world: World) -> Make | None:
    """How to make it. Every rank calls it: they train together up to the step. None: nothing to
    repeat.
    """
    if difference.kind == "start":
        return _building
    precision: Precision = settings.precision or task.precision
    if difference.kind in ("samples", "again"):
        indices = difference.indices
        return (
            None
            if indices is None
            else partial(_reading, precision=precision, keys=(difference.epoch, list(indices)))
        )
    if difference.kind not in ("loss", "gradient"):
        return None
    training = Traced(task, settings, world)
    for window in training.windows():
        if window.step + 1 == difference.step:
            break
        training.step(window)
    if difference.slot is None or difference.slot not in window.slots:
        return None
    batch = window[window.slots.index(difference.slot)]
    state = {name: value.clone() for name, value in training.model.state_dict().items()}
    same = partial(
        alike, difference.kind, tolerance=tolerance_at(difference.step, exact=settings.exact)
    )
    return partial(
        _forwarding,
        precision=precision,
        place=(difference.step - 1, difference.slot),
        state=state,
        batch=batch,
        same=same,
    )


def _building(task: Task, world: World) -> Repeat:
    """The model, under the shared stream."""

    def run() -> str:
        randomness.shared(task.seed)
        return digest_of(weights(model_of(task)))

    return Repeat(run)


def _reading(
    task: Task, world: World, *, precision: Precision, keys: tuple[int, list[int]]
) -> Repeat:
    """The samples of one micro-batch, under their own streams."""
    dataset = KeyedDataset(task.train_data, task.seed, task.collate, world.rank)

    def run() -> str:
        return digest_of(dataset.__getitems__(keys))

    def after_forward() -> str:
        randomness.shared(task.seed)
        forward = Forward(model_of(task).to(world.device), task, precision, world.device)
        batch = to_device(dataset.__getitems__(keys), world.device)
        forward.loss(forward(batch), batch)
        return run()

    return Repeat(run, after_forward=after_forward)


def _forwarding(
    task: Task,
    world: World,
    *,
    precision: Precision,
    place: tuple[int, int],
    state: Mapping[str, Tensor],
    batch: Any,
    same: Callable[[Slot, Slot], bool],
) -> Repeat:
    """Forward and backward of one micro-batch from the weights that it had, under its own
    stream.
    """
    randomness.shared(task.seed)
    model = model_of(task).to(world.device)
    forward = Forward(model, task, precision, world.device)

    def run() -> Slot:
        model.load_state_dict(state)
        own = copy.deepcopy(batch)
        randomness.step(task.seed, *place)
        loss, _ = forward.loss(forward(own), own)
        named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        found = {
            name: sketch(gradient)
            for name, gradient in zip(named, gradients, strict=True)
            if gradient is not None
        }
        return Slot(rank=0, indices=None, samples="", loss=float(loss.detach()), gradients=found)

    return Repeat(run, same)
