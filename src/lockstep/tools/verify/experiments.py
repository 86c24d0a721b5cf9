"""The micro-batch in which two trainings part, run again under other circumstances, one at a time:
what changes it is the cause.

Everything is made anew from the task's file for each circumstance, since a task may have asked who
it is when it was loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from lockstep.config.settings import Settings
from lockstep.launcher.launch import start_ranks
from lockstep.launcher.server import FOR_TRAININGS
from lockstep.step.forward import matmul_precision
from lockstep.tools.verify.compare import Difference
from lockstep.tools.verify.repeats import Make, Repeat, prepared
from lockstep.tools.verify.spy import CLOCK, Seen, watching
from lockstep.tools.verify.tracing import Start
from lockstep.training.opening import computing, intra_op_threads, world_for
from lockstep.training.resolve import resolve
from lockstep.world.world import World

_CLOCK_SECONDS = 1.1  # a seed made of whole seconds is another one after that
_THREADS = (1, 2, 4)
Change = Literal["again", "forward", "reload", "rank", "size", "threads"]


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
