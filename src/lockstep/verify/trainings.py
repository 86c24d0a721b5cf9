"""The task trained at one number of workers, on fresh processes, and traced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.launcher.spawn import launch
from lockstep.settings import Settings
from lockstep.training.opening import computing, world_for
from lockstep.training.resolve import resolve
from lockstep.verify.recording import Traced
from lockstep.verify.trace import Trace, merge

_HASH_SEED = "PYTHONHASHSEED"


def train(settings: Settings) -> Trace:
    """Of `settings.steps` steps on `settings.workers` ranks. Raises WorkerFailed where one fails, as in `lockstep train`."""
    return merge(launch(_on_rank, workers=settings.workers, args=(settings,)))


def _on_rank(settings: Settings) -> Trace:
    task = resolve(settings.task, settings.overrides)
    with world_for(None, settings.device) as world, computing(settings, world):
        return Traced(task, settings, world).walk()


@contextmanager
def one_hash_seed() -> Iterator[None]:
    """Processes that are started in the block hash text alike, so that a set of text has one order in all of them."""
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
    """Whether the user has fixed it for all processes."""
    return os.environ.get(_HASH_SEED, "random") != "random"
