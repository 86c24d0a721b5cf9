"""What can be done again: build the model, read a micro-batch's samples, run it forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep import randomness
from lockstep.checkpoints.identity import weights
from lockstep.data.device import to_device
from lockstep.data.keyed import KeyedDataset
from lockstep.settings import Settings
from lockstep.task import Precision, Task
from lockstep.training.build import model_of
from lockstep.training.forward import Forward
from lockstep.verify.compare import Difference, alike, tolerance_at
from lockstep.verify.digest import digest_of, sketch
from lockstep.verify.recording import Traced
from lockstep.verify.trace import Slot
from lockstep.world import World


class Repeated(Protocol):
    """One thing, under one circumstance."""

    def run(self) -> Any:
        """Do it, and return what came out."""
        ...

    def alike(self, one: Any, other: Any) -> bool: ...

    def after_forward(self, first: Any) -> Any:
        """What comes out when the model and the loss have had a turn in between; `first` where that is not asked."""
        ...


def prepared(
    task: Task, settings: Settings, difference: Difference, world: World, *, exact: bool
) -> Callable[[Task, World], Repeated] | None:
    """How to make it from a task that was just loaded. Every rank calls it: they train together up to the step. None: nothing to repeat."""
    precision: Precision = settings.precision or task.precision
    if difference.kind == "start":
        return Building
    if difference.kind in ("samples", "again"):
        indices = difference.indices
        return None if indices is None else lambda found, at: Reading(found, at, precision, difference.epoch, list(indices))
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
    tolerance = tolerance_at(difference.step, exact=exact)
    return lambda found, at: Forwarding(found, at, precision, difference, state, batch, tolerance)


class Building:
    """The model, under the shared stream."""

    def __init__(self, task: Task, world: World) -> None:
        self._task = task

    def run(self) -> str:
        randomness.shared(self._task.seed)
        return digest_of(weights(model_of(self._task)))

    def alike(self, one: str, other: str) -> bool:
        return one == other

    def after_forward(self, first: str) -> str:
        return first


class Reading:
    """The samples of one micro-batch, under their own streams."""

    def __init__(self, task: Task, world: World, precision: Precision, epoch: int, indices: list[int]) -> None:
        self._task, self._device, self._precision = task, world.device, precision
        self._keys = epoch, indices
        self._dataset = KeyedDataset(task.train_data, task.seed, task.collate, world.rank)

    def run(self) -> str:
        return digest_of(self._dataset.__getitems__(self._keys))

    def alike(self, one: str, other: str) -> bool:
        return one == other

    def after_forward(self, first: str) -> str:
        randomness.shared(self._task.seed)
        forward = Forward(model_of(self._task).to(self._device), self._task, self._precision, self._device)
        batch = to_device(self._dataset.__getitems__(self._keys), self._device)
        forward.loss(forward(batch), batch)
        return self.run()


class Forwarding:
    """Forward and backward of one micro-batch from the weights that it had, under its own stream."""

    def __init__(
        self,
        task: Task,
        world: World,
        precision: Precision,
        difference: Difference,
        state: Mapping[str, Tensor],
        batch: Any,
        tolerance: float,
    ) -> None:
        assert difference.slot is not None
        randomness.shared(task.seed)
        self._model = model_of(task).to(world.device)
        self._forward = Forward(self._model, task, precision, world.device)
        self._key = task.seed, difference.step - 1, difference.slot
        self._kind, self._state, self._batch, self._tolerance = difference.kind, state, batch, tolerance

    def run(self) -> Slot:
        self._model.load_state_dict(self._state)
        batch = copy.deepcopy(self._batch)
        randomness.step(*self._key)
        loss, _ = self._forward.loss(self._forward(batch), batch)
        named = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        found = {name: sketch(gradient) for name, gradient in zip(named, gradients, strict=True) if gradient is not None}
        return Slot(rank=0, indices=None, samples="", loss=float(loss.detach()), gradients=found)

    def alike(self, one: Slot, other: Slot) -> bool:
        return alike(self._kind, one, other, self._tolerance)

    def after_forward(self, first: Slot) -> Slot:
        return first
