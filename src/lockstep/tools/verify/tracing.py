"""Run a traced training at one number of workers, in fresh processes: as `lockstep train` trains,
with a step that records a trace.

Tracing does not change the computed values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lockstep.data.keyed import KeyedDataset
from lockstep.launcher.launch import start_ranks
from lockstep.runs import AssembledTraining, Settings, rebuilt
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

_SAMPLES_FOR_NOISE = 8
_HASH_SEED = "PYTHONHASHSEED"
Start = Callable[..., list[Any]]
"""Runs a function on ranks: launcher.launch.start_ranks, or its equivalent on other machines."""


class TracedTraining:
    """Trains on this rank as `lockstep train` does, and records every micro-batch."""

    def __init__(self, training: AssembledTraining) -> None:
        self.training = training
        self.trace = Trace(workers=training.world.size, start=self._weights(), steps=[])
        self._open: Slot | None = None
        for name, parameter in training.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._record, name))

    def walk(self) -> Trace:
        """Take all steps, then read the first step's samples again, and some of them alone."""
        for window in self.training.windows():
            self.step(window)
            if window.step + 1 == self.training.settings.steps:
                break
        if self.trace.steps:
            self._read_again(self.trace.steps[0].slots)
        self.trace.sha256 = self.training.model_shard.digest()
        return self.trace

    def step(self, window: Any) -> None:
        """Train one window, and record it."""
        slots: dict[int, Slot] = {}
        training = self.training
        indices = indices_of(training.loader, window)
        batches = training.stepper.micro_batches(window)
        for batch, number in zip(batches, window.slots, strict=True):
            slot = Slot(training.world.rank, indices.get(number), digest_of(batch))
            slots[number] = slot
            self._open = slot
            loss, weight = training.forward.loss(training.forward(batch), batch)
            slot.loss = float(loss.detach())
            slot.random = random_states(training.world.device)
            training.stepper.backward(loss, weight)
            self._open = None
        result = training.stepper.step()
        self.trace.steps.append(
            TracedStep(epoch=window.epoch, slots=slots, loss=result.loss, weights=self._weights())
        )

    def _record(self, name: str, gradient: Tensor) -> None:
        """Record a gradient before it is added to those of other micro-batches in `.grad`."""
        if self._open is not None:
            self._open.gradients[name] = sketch(gradient)

    def _weights(self) -> dict[str, Sketch]:
        """Return the weights in the model's order, parameters before buffers, so that the first
        difference is the most useful one.
        """
        return {name: sketch(tensor) for name, tensor in tensors_of(self.training.model).items()}

    def _read_again(self, slots: Mapping[int, Slot]) -> None:
        """Read the samples of these micro-batches again: all together, and some of them alone."""
        task = self.training.task
        dataset = KeyedDataset(task.train_data, task.seed, task.collate, self.training.world.rank)
        again = {}
        indices: list[int] = []
        for number, slot in slots.items():
            if slot.indices is not None:
                again[number] = digest_of(dataset.__getitems__((0, list(slot.indices))))
                indices += slot.indices
        self.trace.again = again
        some = indices[:_SAMPLES_FOR_NOISE]
        self.trace.equal_noise = samples_with_equal_noise(task.train_data, task.seed, some)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name. They are the model's own."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in tensors}


def indices_of(loader: Any, window: Any) -> dict[int, tuple[int, ...]]:
    """Return the sample indices of this rank's micro-batches in a window, by slot. The result is
    empty for a stream.
    """
    plan = getattr(loader, "batch_plan", None)
    if plan is None:
        return {}
    by_slot = loader.indices(window.epoch, window.step - plan.first(window.epoch))
    return {slot: tuple(by_slot[slot]) for slot in window.slots}


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
        variables=_own_hash_seed if seeded else None,
    )
    return merge(traces)


def _own_hash_seed(rank: int) -> dict[str, str]:
    return {_HASH_SEED: str(1 + rank)}


def _on_rank(settings: Settings) -> Trace:
    with rebuilt(settings) as training:
        return TracedTraining(training).walk()


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
