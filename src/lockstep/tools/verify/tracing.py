"""Run a traced training at one number of workers, in fresh processes. It is the Training of
`lockstep train` with a step that records a trace.

Tracing does not change the computed values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from lockstep.checks.identity import sha256, weights
from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.data.keyed import KeyedDataset
from lockstep.data.windows import ENDLESS, Window
from lockstep.launcher.launch import start_ranks
from lockstep.launcher.start import FOR_TRAININGS
from lockstep.step.step_result import StepResult
from lockstep.tools.verify.equal_noise import samples_with_equal_noise
from lockstep.tools.verify.trace import (
    Sketch,
    Slot,
    Trace,
    TracedStep,
    digest_of,
    merge,
    random_states,
    sketch,
)
from lockstep.training.loop import Training
from lockstep.training.opening import computing, matmul_precision, world_for
from lockstep.training.resolve import resolve
from lockstep.world.world import World

_SAMPLES_FOR_NOISE = 8
_HASH_SEED = "PYTHONHASHSEED"
Start = Callable[..., list[Any]]
"""Runs a function on ranks: launcher.launch.start_ranks, or its equivalent on other machines."""


class Traced(Training):
    """One rank's training, without evaluations and without a run directory."""

    def __init__(self, task: Task, settings: Settings, world: World) -> None:
        super().__init__(task, settings, world, None)
        self.trace = Trace(workers=world.size, start=self._weights(), steps=[])
        self._open: Slot | None = None
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._record, name))

    def walk(self) -> Trace:
        """Take all steps, then read the first step's samples again, and some of them alone."""
        steps = self.settings.steps
        assert steps is not None, "the command always says how many"
        with matmul_precision(self.precision):
            for window in self.windows():
                self.step(window)
                if self.stepper.steps == steps:
                    break
        if self.trace.steps:
            self._read_again(self.trace.steps[0].slots)
        self.trace.sha256 = sha256(weights(self.model))
        return self.trace

    def windows(self) -> Iterator[Window]:
        """Yield the windows of all epochs in the order of `lockstep train`."""
        for epoch in self.loader.epochs(self.length.epochs or ENDLESS):
            yield from epoch
            if self.task.scheduler_per == "epoch" and self.scheduler is not None:
                self.scheduler.step()

    def step(self, window: Window) -> StepResult:
        """Do what `Training.step` does, and record every micro-batch."""
        slots: dict[int, Slot] = {}
        indices = indices_of(self.loader, window)
        batches = self.stepper.micro_batches(window)
        for batch, number in zip(batches, window.slots, strict=True):
            slot = Slot(self.world.rank, indices.get(number), digest_of(batch))
            slots[number] = slot
            self._open = slot
            loss, weight = self.forward.loss(self.forward(batch), batch)
            slot.loss = float(loss.detach())
            slot.random = random_states(self.world.device)
            self.stepper.backward(loss, weight)
            self._open = None
        result = self.stepper.step()
        self.trace.steps.append(
            TracedStep(epoch=window.epoch, slots=slots, loss=result.loss, weights=self._weights())
        )
        return result

    def _record(self, name: str, gradient: Tensor) -> None:
        """Record a gradient before it is added to those of other micro-batches in `.grad`."""
        if self._open is not None:
            self._open.gradients[name] = sketch(gradient)

    def _weights(self) -> dict[str, Sketch]:
        """Return the weights in the model's order, parameters before buffers, so that the first
        difference is the most useful one.
        """
        tensors = weights(self.model)
        order = [name for name, _ in self.model.named_parameters() if name in tensors]
        return {name: sketch(tensors[name]) for name in dict.fromkeys([*order, *tensors])}

    def _read_again(self, slots: Mapping[int, Slot]) -> None:
        """Read the samples of these micro-batches again: all together, and some of them alone."""
        task = self.task
        dataset = KeyedDataset(task.train_data, task.seed, task.collate, self.world.rank)
        again = {}
        indices: list[int] = []
        for number, slot in slots.items():
            if slot.indices is not None:
                again[number] = digest_of(dataset.__getitems__((0, list(slot.indices))))
                indices += slot.indices
        self.trace.again = again
        some = indices[:_SAMPLES_FOR_NOISE]
        self.trace.equal_noise = samples_with_equal_noise(task.train_data, task.seed, some)


def indices_of(loader: Any, window: Window) -> dict[int, tuple[int, ...]]:
    """Return the sample indices of this rank's micro-batches in a window, by slot. The result is
    empty for a stream.
    """
    batch_plan = getattr(loader, "batch_plan", None)
    if batch_plan is None or not window.slots:
        return {}
    step = window.step - batch_plan.first(window.epoch)
    micro_batches = batch_plan.indices(window.epoch, range(step, step + 1), window.slots)
    return dict(zip(window.slots, map(tuple, micro_batches), strict=True))


def train(settings: Settings, *, own_hash_seeds: bool = False, start: Start = start_ranks) -> Trace:
    """Trace a training of `settings.steps` steps on `settings.workers` ranks. Raise WorkerFailed if
    a rank fails, as `lockstep train` does.

    Ranks that are forked from one process hash text alike. With `own_hash_seeds` each rank is a
    fresh interpreter with its own hash seed, as ranks on several hosts are, unless the user has
    fixed the seed.
    """
    seeded = own_hash_seeds and not hash_seed_is_fixed()
    traces = start(
        _on_rank,
        settings.workers,
        (settings,),
        {},
        timeout=None,
        imports=FOR_TRAININGS,
        variables=_own_hash_seed if seeded else None,
    )
    return merge(traces)


def _own_hash_seed(rank: int) -> dict[str, str]:
    return {_HASH_SEED: str(1 + rank)}


def _on_rank(settings: Settings) -> Trace:
    task = resolve(settings.task, settings.overrides)
    with world_for(None, settings.device) as world, computing(settings, world):
        return Traced(task, settings, world).walk()


@contextmanager
def one_hash_seed() -> Iterator[None]:
    """Make processes that start in the block hash text alike, so that a set of text has the same
    order in all of them.
    """
    before = os.environ.get(_HASH_SEED)
    os.environ[_HASH_SEED] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_HASH_SEED]
        else:
            os.environ[_HASH_SEED] = before


def hash_seed_is_fixed() -> bool:
    """Whether the user has fixed the hash seed for all processes."""
    return os.environ.get(_HASH_SEED, "random") != "random"
