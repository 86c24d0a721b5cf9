"""The Bench of the search: trials that are built when they are first needed, on ranks that all decide alike."""

from __future__ import annotations

import gc
from dataclasses import replace
from statistics import median
from time import monotonic
from typing import Any

from lockstep.errors import UsageError
from lockstep.measure.turns import take_turns
from lockstep.settings import Settings
from lockstep.task import Task
from lockstep.tuning.paired import FEWEST, STEADY, WARM_UP, Times, largest, steady_turns, turns_by_step
from lockstep.tuning.search import Point, Refused
from lockstep.tuning.trial import Trial
from lockstep.world import World

_MOST = 200  # turns


class Trials:
    """Times points on this rank. At most two trials are alive, so that a search needs no more than two models' memory."""

    def __init__(self, task: Task, settings: Settings, world: World, seconds: float) -> None:
        self._task, self._settings, self._world = task, settings, world
        self._ends = monotonic() + seconds
        self._alive: dict[tuple[Any, ...], Trial] = {}
        self._step = 0.0  # seconds
        self._before = 0.0  # seconds that a comparison takes beside its turns: models are built, perhaps compiled

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *exception: object) -> None:
        self._keep()

    def first(self, point: Point) -> Trial:
        """The trial of that point, after its first steps, from which it is known how long steps are."""
        began = monotonic()
        trial = self._trial(point)
        self._step = max(take_turns({"only": trial.step}, 2, self._world, warm_up=WARM_UP)["only"])
        self._before = self._beside(began, (2 + WARM_UP) * self._step)
        return trial

    def time(self, base: Point, candidate: Point, seconds: float) -> Times:
        """Raises Refused for a candidate that Lockstep refuses, which it does on all ranks alike."""
        self._keep(base, candidate)
        began = monotonic()
        turns = max(FEWEST, min(_MOST, int((seconds - self._before) / self._turn(base, candidate)) - WARM_UP))
        timed = steady_turns if _load_differently(base, candidate) else turns_by_step
        ours = self._trial(base)
        try:
            found = timed(ours, self._trial(candidate), turns, self._world)
        except UsageError as error:
            raise Refused(str(error)) from error
        self._step = max(map(median, found))
        self._before = self._beside(began, (turns + WARM_UP) * self._turn(base, candidate))
        return found

    def left(self) -> float:
        return -largest(monotonic() - self._ends, self._world)

    def least(self, base: Point, candidate: Point) -> float:
        return self._before + (FEWEST + WARM_UP) * self._turn(base, candidate)

    def _beside(self, began: float, turns: float) -> float:
        return max(0.0, largest(monotonic() - began, self._world) - turns)

    def _turn(self, base: Point, candidate: Point) -> float:
        """Seconds of one turn of both."""
        return 2 * self._step * (1 + STEADY if _load_differently(base, candidate) else 1)

    def _trial(self, point: Point) -> Trial:
        found = self._alive.get(_key(point))
        if found is None:
            found = self._alive[_key(point)] = Trial(self._task, replace(self._settings, **dict(point)), self._world)  # type: ignore[arg-type]
        return found

    def _keep(self, *points: Point) -> None:
        """Close all other trials. Reducers and hooks refer to each other: their memory goes when the collector comes."""
        keys = [_key(point) for point in points]
        for key in [key for key in self._alive if key not in keys]:
            self._alive.pop(key).close()
        gc.collect()


def _load_differently(base: Point, candidate: Point) -> bool:
    return base["loader_workers"] != candidate["loader_workers"]


def _key(point: Point) -> tuple[Any, ...]:
    return tuple(point.items())
