"""Repeat the micro-batch where two trainings first differ, and change one circumstance at a time.
The first circumstance that changes the result is the cause.

The task is loaded from its file again for each circumstance, because a task may read its rank when
it is loaded.
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

from lockstep import Task, World
from lockstep.data.device import to_device
from lockstep.data.keyed import KeyedDataset
from lockstep.launcher.launch import start_ranks
from lockstep.runs import AssembledTraining, Settings, load_task, rebuilt
from lockstep.runtime import randomness
from lockstep.step.forward import Forward
from lockstep.tools.verify.spy import CLOCK, Seen, watching
from lockstep.tools.verify.trace import Difference, Slot, alike, digest_of, sketch, tolerance_at
from lockstep.tools.verify.tracing import Start, tensors_of
from lockstep.training.build import model_of
from lockstep.training.opening import intra_op_threads

_CLOCK_SECONDS = 1.1  # a seed made of whole seconds differs after that
_THREADS = (1, 2, 4)
Change = Literal["again", "forward", "reload", "rank", "size", "threads"]


# -- circumstances -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """The findings of the rank that ran the micro-batch."""

    seen: Seen
    """Calls during the first run of the micro-batch."""
    loading: Seen
    """Calls while the task was loaded and its model was built."""
    changed: Change | None
    """The first of these circumstances that changed the result; None if none did:

    again    run a second time in the same process
    forward  samples read again after the model and the loss have used them
    reload   run after the task was loaded a second time
    rank     as another rank
    size     among another number of workers
    threads  with another number of intra-op threads
    """


def experiment(
    settings: Settings, difference: Difference, *, start: Start = start_ranks
) -> Evidence:
    """Repeat the micro-batch of `difference` in the larger of the two worlds, on the rank that
    ran it there.
    """
    worlds = list(zip(difference.workers, difference.ranks or (0, 0), strict=True))
    size, rank = max(worlds, key=operator.itemgetter(0))
    other = min(worlds, key=operator.itemgetter(0))
    arguments = settings, difference, rank, other
    results = start(_on_rank, size, arguments, {}, timeout=None)
    evidence: Evidence | None = results[rank]
    assert evidence is not None
    return evidence


def _on_rank(
    settings: Settings, difference: Difference, rank: int, other: tuple[int, int]
) -> Evidence | None:
    """Train on all ranks up to the step, then experiment on `rank`. The other ranks wait for it
    when they leave the world.
    """
    with rebuilt(settings) as training:
        make = prepared(training, difference)
        if make is None or training.world.rank != rank:
            return None
        return _evidence(make, settings, training.world, other)


def _evidence(make: Make, settings: Settings, world: World, other: tuple[int, int]) -> Evidence:
    """Run the experiments. `other` is the size of the other world, and the rank there."""

    def reload() -> Repeat:
        return make(load_task(settings), world)

    with watching() as loading:
        repeat = reload()
    with watching() as seen:
        first = repeat.run()
    if seen.of(CLOCK) or loading.of(CLOCK):
        time.sleep(_CLOCK_SECONDS)

    def changes(circumstance: AbstractContextManager[None]) -> bool:
        with circumstance:
            reloaded = reload()
            return not reloaded.alike(first, reloaded.run())

    def first_change() -> Change | None:
        if not repeat.alike(first, repeat.run()):
            return "again"
        if repeat.after_forward is not None and not repeat.alike(first, repeat.after_forward()):
            return "forward"
        if changes(nullcontext()):
            return "reload"
        size, rank = other
        ranks = sorted({rank, 0, world.size - 1} - {world.rank})
        if any(changes(pretending(world, pretended, world.size)) for pretended in ranks):
            return "rank"
        if size != world.size and changes(pretending(world, world.rank, size)):
            return "size"
        if settings.exact:  # always uses one number of threads; another number gives other bits
            return None
        counts = sorted(set(_THREADS) - {torch.get_num_threads()})
        return "threads" if any(changes(intra_op_threads(count)) for count in counts) else None

    return Evidence(seen, loading, first_change())


@contextmanager
def pretending(world: World, rank: int, size: int) -> Iterator[None]:
    """Make the environment, torch.distributed and `world` say in the block that this process is
    rank `rank` of `size`. No collective may run in the block.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    own = world.rank, world.size, world.local_rank, world.local_size
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
        world.rank, world.size, world.local_rank, world.local_size = own
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# -- what can be repeated: build the model, read samples, run forward and backward ----------------


@dataclass(frozen=True, slots=True)
class Repeat:
    """A piece of work that can be repeated under one circumstance."""

    run: Callable[[], Any]
    """Do the work and return its result."""
    alike: Callable[[Any, Any], bool] = operator.eq
    """Whether two results are equal."""
    after_forward: Callable[[], Any] | None = None
    """Run the model and the loss, then repeat the work; None if that does not apply."""


Make = Callable[[Task, World], Repeat]
"""Makes a Repeat from a freshly loaded task."""


def prepared(training: AssembledTraining, difference: Difference) -> Make | None:
    """Return what makes the Repeat for `difference`; None if nothing can be repeated. Every rank
    must call it: the ranks train together up to the step.
    """
    if difference.kind == "start":
        return _building
    precision = training.precision
    if difference.kind in ("samples", "again"):
        if difference.indices is None:
            return None
        keys = (difference.epoch, list(difference.indices))
        return partial(_reading, precision=precision, keys=keys)
    if difference.kind not in ("loss", "gradient"):
        return None
    for window in training.windows():
        if window.step + 1 == difference.step:
            break
        training.step(window)
    if difference.slot is None or difference.slot not in window.slots:
        return None
    batch = window[window.slots.index(difference.slot)]
    state = {name: value.clone() for name, value in training.model.state_dict().items()}
    tolerance = tolerance_at(difference.step, exact=training.settings.exact)
    return partial(
        _forwarding,
        precision=precision,
        stream=(difference.step - 1, difference.slot),
        state=state,
        batch=batch,
        same=partial(alike, difference.kind, tolerance=tolerance),
    )


def _building(task: Task, world: World) -> Repeat:
    """Build the model, with the shared random stream."""

    def run() -> str:
        return digest_of(tensors_of(model_of(task)))

    return Repeat(run)


def _reading(task: Task, world: World, *, precision: Any, keys: tuple[int, list[int]]) -> Repeat:
    """Read the samples of one micro-batch, each with its own random stream."""
    dataset = KeyedDataset(task.train_data, task.seed, task.collate, world.rank)

    def run() -> str:
        return digest_of(dataset.__getitems__(keys))

    def after_forward() -> str:
        forward = Forward(model_of(task).to(world.device), task, precision, world.device)
        batch = to_device(dataset.__getitems__(keys), world.device)
        forward.loss(forward(batch), batch)
        return run()

    return Repeat(run, after_forward=after_forward)


def _forwarding(
    task: Task,
    world: World,
    *,
    precision: Any,
    stream: tuple[int, int],
    state: Mapping[str, Tensor],
    batch: Any,
    same: Callable[[Slot, Slot], bool],
) -> Repeat:
    """Run forward and backward of one micro-batch, with the weights it had and its own random
    stream: that of (step, slot).
    """
    model = model_of(task).to(world.device)
    forward = Forward(model, task, precision, world.device)

    def run() -> Slot:
        model.load_state_dict(state)
        own = copy.deepcopy(batch)
        randomness.step(task.seed, *stream)
        loss, _ = forward.loss(forward(own), own)
        trained = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        parameters = [parameter for _, parameter in trained]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        slot = Slot(rank=0, indices=None, samples="", loss=float(loss.detach()))
        for (name, _), gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                slot.gradients[name] = sketch(gradient)
        return slot

    return Repeat(run, same)
