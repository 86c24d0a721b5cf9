"""The micro-batch in which two trainings part, run again under other circumstances, one at a time:
what changes it is the cause.

Everything is made anew from the task's file for each circumstance, since a task may have asked who
it is when it was loaded.
"""

from __future__ import annotations

import copy
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoints.identity import weights
from lockstep.config.settings import Settings
from lockstep.config.task import Precision, Task
from lockstep.data.device import to_device
from lockstep.data.keyed import KeyedDataset
from lockstep.launcher.launch import start_ranks
from lockstep.launcher.server import FOR_TRAININGS
from lockstep.runtime import randomness
from lockstep.step.forward import Forward, matmul_precision
from lockstep.tools.verify.spy import CLOCK, Seen, watching
from lockstep.tools.verify.trace import Difference, Slot, alike, digest_of, sketch, tolerance_at
from lockstep.tools.verify.tracing import Start, Traced
from lockstep.training.build import model_of
from lockstep.training.opening import computing, intra_op_threads, world_for
from lockstep.training.resolve import resolve
from lockstep.world.world import World

_CLOCK_SECONDS = 1.1  # a seed made of whole seconds is another one after that
_THREADS = (1, 2, 4)
Change = Literal["again", "forward", "reload", "rank", "size", "threads"]


# -- circumstances -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rank that ran the micro-batch found out."""

    seen: Seen
    """While it ran for the first time."""
    loading: Seen
    """While the task was loaded, and its model built."""
    changed: Change | None
    """The first circumstance of these under which something else came out:

    again    run a second time in the same process
    forward  samples read once more after the model and the loss have had them
    reload   the task loaded a second time, and run then
    rank     as another rank
    size     among another number of workers
    threads  with another number of intra-op threads
    """


def experiment(
    settings: Settings, difference: Difference, *, start: Start = start_ranks
) -> Evidence:
    """Repeat the micro-batch of `difference` on the larger of the two worlds, as the rank that
    ran it there.
    """
    places = list(zip(difference.workers, difference.ranks or (0, 0), strict=True))
    (size, rank), other = (
        max(places, key=lambda each: each[0]),
        min(places, key=lambda each: each[0]),
    )
    asked = settings, difference, rank, other
    found: Evidence | None = start(_on_rank, size, asked, {}, timeout=None, imports=FOR_TRAININGS)[
        rank
    ]
    assert found is not None
    return found


def _on_rank(
    settings: Settings, difference: Difference, rank: int, other: tuple[int, int]
) -> Evidence | None:
    """The ranks train together up to the step; then one of them experiments, and the others wait
    for it at the world's end.
    """
    task = resolve(settings.task, settings.overrides)
    precision = settings.precision or task.precision
    with (
        world_for(None, settings.device) as world,
        computing(settings, world),
        matmul_precision(precision),
    ):
        make = prepared(task, settings, difference, world)
        return (
            _evidence(make, settings, world, other)
            if make is not None and world.rank == rank
            else None
        )


def _evidence(make: Make, settings: Settings, world: World, other: tuple[int, int]) -> Evidence:
    """`other`: the size of the other world, and the rank there."""

    def fresh() -> Repeat:
        return make(resolve(settings.task, settings.overrides), world)

    with watching() as loading:
        repeat = fresh()
    with watching() as seen:
        first = repeat.run()
    if seen.of(CLOCK) or loading.of(CLOCK):
        time.sleep(_CLOCK_SECONDS)

    def changes(circumstance: AbstractContextManager[None]) -> bool:
        with circumstance:
            made = fresh()
            return not made.alike(first, made.run())

    def first_change() -> Change | None:
        if not repeat.alike(first, repeat.run()):
            return "again"
        if repeat.after_forward is not None and not repeat.alike(first, repeat.after_forward()):
            return "forward"
        if changes(nullcontext()):
            return "reload"
        size, rank = other
        ranks = sorted({rank, 0, world.size - 1} - {world.rank})
        if any(changes(pretending(world, each, world.size)) for each in ranks):
            return "rank"
        if size != world.size and changes(pretending(world, world.rank, size)):
            return "size"
        # Exact mode has one number everywhere, and others give other bits.
        counts = set() if settings.exact else set(_THREADS) - {torch.get_num_threads()}
        return (
            "threads" if any(changes(intra_op_threads(count)) for count in sorted(counts)) else None
        )

    return Evidence(seen, loading, first_change())


@contextmanager
def pretending(world: World, rank: int, size: int) -> Iterator[None]:
    """In the block the environment, torch.distributed and `world` say that this is rank `rank`
    of `size`. No collective may run in it.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    ours = world.rank, world.size, world.local_rank, world.local_size
    group: Any = dist.ProcessGroup
    real = {name: vars(group)[name] for name in ("rank", "size")}
    try:
        os.environ.update(dict(zip(names, map(str, (rank, rank, size, size)), strict=True)))
        world.rank, world.size, world.local_rank, world.local_size = rank, size, rank, size
        group.rank, group.size = lambda self: rank, lambda self: size
        yield
    finally:
        for name, function in real.items():
            setattr(group, name, function)
        world.rank, world.size, world.local_rank, world.local_size = ours
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# -- what can be done again: build the model, read samples, run forward and backward --------------


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
