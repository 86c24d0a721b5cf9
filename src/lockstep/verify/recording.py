"""A training that is traced: the Training of `lockstep train`, whose step notes what it sees. Nothing of it reaches the mathematics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from lockstep.checkpoints.identity import sha256, weights
from lockstep.data.keyed import KeyedDataset
from lockstep.data.windows import Window
from lockstep.settings import Settings
from lockstep.step_result import StepResult
from lockstep.task import Task
from lockstep.training.forward import matmul_precision
from lockstep.training.train import Training
from lockstep.verify.digest import Sketch, digest_of, random_states, sketch
from lockstep.verify.trace import Slot, Step, Trace
from lockstep.world import World

_WITHOUT_END = 2**62  # epochs


class Traced(Training):
    """One rank's training, without evaluations and without a run directory."""

    def __init__(self, task: Task, settings: Settings, world: World) -> None:
        super().__init__(task, settings, world, None)
        self.trace = Trace(workers=world.size, start=self._weights(), steps=[])
        self._open: Slot | None = None
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._landed, name))

    def walk(self) -> Trace:
        """Take all steps, and look at the first step's samples once more."""
        steps = self.settings.steps
        assert steps is not None, "the command always says how many"
        with matmul_precision(self.precision):
            for window in self.windows():
                self.step(window)
                if self.stepper.steps == steps:
                    break
        self.trace.again = self._read_again()
        self.trace.sha256 = sha256(weights(self.model))
        return self.trace

    def windows(self) -> Iterator[Window]:
        """One after the other through the epochs, as `lockstep train` walks them."""
        for epoch in self.loader.epochs(self.length.epochs or _WITHOUT_END):
            yield from epoch
            if self.task.scheduler_per == "epoch" and self.scheduler is not None:
                self.scheduler.step()

    def step(self, window: Window) -> StepResult:
        """`Training.step`, with a look at every micro-batch."""
        slots: dict[int, Slot] = {}
        indices = indices_of(self.loader, window)
        for place, batch in enumerate(self.stepper.micro_batches(window)):
            self._open = Slot(rank=self.world.rank, indices=indices.get(window.slots[place]), samples=digest_of(batch))
            slots[window.slots[place]] = self._open
            loss, weight = self.forward.loss(self.forward(batch), batch)
            self._open.loss = float(loss.detach())
            self._open.random = random_states(self.world.device)
            self.stepper.backward(loss, weight)
            self._open = None
        result = self.stepper.step()
        self.trace.steps.append(Step(epoch=window.epoch, slots=slots, loss=result.loss, weights=self._weights()))
        return result

    def _landed(self, name: str, gradient: Tensor) -> None:
        """Before it is added to what other micro-batches have left in `.grad`."""
        if self._open is not None:
            self._open.gradients[name] = sketch(gradient)

    def _weights(self) -> dict[str, Sketch]:
        """In the model's order, parameters first: the first that differs is then the one to look at."""
        tensors = weights(self.model)
        order = [name for name, _ in self.model.named_parameters() if name in tensors]
        return {name: sketch(tensors[name]) for name in dict.fromkeys([*order, *tensors])}

    def _read_again(self) -> Mapping[int, str]:
        if not self.trace.steps:
            return {}
        found = {slot: each.indices for slot, each in self.trace.steps[0].slots.items()}
        dataset = KeyedDataset(self.task.train_data, self.task.seed, self.task.collate, self.world.rank)
        return {slot: digest_of(dataset.__getitems__((0, list(indices)))) for slot, indices in found.items() if indices is not None}


def indices_of(loader: Any, window: Window) -> dict[int, tuple[int, ...]]:
    """The samples of this rank's micro-batches of a window, by slot; empty for a stream."""
    course = getattr(loader, "course", None)
    if course is None or not window.slots:
        return {}
    place = window.step - course.first(window.epoch)
    found = course.indices(window.epoch, range(place, place + 1), window.slots)
    return {slot: tuple(indices) for slot, indices in zip(window.slots, found, strict=True)}
