"""The micro-batch in which two trainings part, run again under other circumstances, one at a time: what changes it is the cause.

Everything is made anew from the task's file for each circumstance, since a task may have asked who it is when it was loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.launcher.spawn import launch
from lockstep.settings import Settings
from lockstep.task import Task
from lockstep.training.forward import matmul_precision
from lockstep.training.opening import computing, world_for
from lockstep.training.resolve import resolve
from lockstep.training.threads import intra_op_threads
from lockstep.verify.compare import Difference
from lockstep.verify.identity import pretending
from lockstep.verify.repeated import Repeated, prepared
from lockstep.verify.spy import CLOCK, Seen, watching
from lockstep.world import World

_CLOCK_SECONDS = 1.1  # a seed made of whole seconds is another one after that
_THREADS = (1, 2, 4)


@dataclass(slots=True)
class Evidence:
    """What the rank that ran the micro-batch found out."""

    seen: Seen = field(default_factory=Seen)
    """While it ran for the first time."""
    loading: Seen = field(default_factory=Seen)
    """While the task was loaded, and its model built."""
    repeats: bool = True
    """Running it a second time in the same process gave the same."""
    reloads: bool = True
    """So did loading the task a second time, and running it then."""
    after_forward: bool = False
    """Samples read once more were others only after the model and the loss had had them."""
    rank: bool = False
    """As another rank it would have given something else."""
    size: bool = False
    """Among another number of workers it would have."""
    threads: bool = False
    """With another number of intra-op threads it would have."""

    @property
    def silent(self) -> bool:
        """Nothing changed it."""
        return self.repeats and self.reloads and not (self.after_forward or self.rank or self.size or self.threads)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a micro-batch ran."""

    rank: int
    size: int


def experiment(settings: Settings, difference: Difference, *, exact: bool) -> Evidence:
    """Repeat the micro-batch of `difference` on the larger of the two worlds, as the rank that ran it there."""
    places = [Place(rank, size) for rank, size in zip(difference.ranks or (0, 0), difference.workers, strict=True)]
    here, other = max(places, key=lambda place: place.size), min(places, key=lambda place: place.size)
    found = launch(_on_rank, workers=here.size, args=(settings, difference, here, other, exact))[here.rank]
    assert found is not None
    return found


def _on_rank(settings: Settings, difference: Difference, here: Place, other: Place, exact: bool) -> Evidence | None:
    """The ranks train together up to the step; then one of them experiments, and the others wait for it at the world's end."""
    task = resolve(settings.task, settings.overrides)
    with world_for(None, settings.device) as world, computing(settings, world), matmul_precision(settings.precision or task.precision):
        make = prepared(task, settings, difference, world, exact=exact)
        return _evidence(make, settings, world, other, exact=exact) if make is not None and world.rank == here.rank else None


def _evidence(make: Callable[[Task, World], Repeated], settings: Settings, world: World, other: Place, *, exact: bool) -> Evidence:
    def fresh() -> Repeated:
        return make(resolve(settings.task, settings.overrides), world)

    with watching() as loading:
        repeated = fresh()
    with watching() as seen:
        first = repeated.run()
    if seen.of(CLOCK) or loading.of(CLOCK):
        time.sleep(_CLOCK_SECONDS)
    found = Evidence(seen, loading, repeats=repeated.alike(first, repeated.run()))
    if found.repeats:
        found.after_forward = not repeated.alike(first, repeated.after_forward(first))
    if found.repeats and not found.after_forward:
        found.reloads = repeated.alike(first, fresh().run())
    if not found.silent:
        return found

    def changes(rank: int, size: int) -> bool:
        with pretending(world, rank, size):
            made = fresh()
            return not made.alike(first, made.run())

    found.rank = any(changes(rank, world.size) for rank in sorted({other.rank, 0, world.size - 1} - {world.rank}))
    found.size = other.size != world.size and changes(world.rank, other.size)
    found.threads = not exact and _threads_change(fresh, first)  # exact mode has one number everywhere, and others give other bits
    return found


def _threads_change(fresh: Callable[[], Repeated], first: Any) -> bool:
    for count in _THREADS:
        if count != torch.get_num_threads():
            with intra_op_threads(count):
                made = fresh()
                if not made.alike(first, made.run()):
                    return True
    return False
