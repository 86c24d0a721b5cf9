"""`python -m lockstep.tools.tune.tune_rank DIR SECONDS`: one rank of `lockstep tune`. The settings
to begin from stand in DIR/settings.json.

Rank 0 tells every comparison on stderr as it is known and leaves DIR/answer.json. The search's Bench
is Trials: they are built when they are first needed, on ranks that all decide alike.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.errors import UsageError
from lockstep.runtime.cores import cores, processor
from lockstep.tools.timing.in_turns import Trial, largest, take_turns
from lockstep.tools.tune.knobs import knobs
from lockstep.tools.tune.search import Found, KnobRow, Point, Refused, search
from lockstep.tools.tune.table import progress
from lockstep.training.opening import backend_of
from lockstep.training.resolve import resolve
from lockstep.training.tuned import KNOBS
from lockstep.world.world import World, init

ANSWER = "answer.json"
FEWEST = 3  # turns
# turns: the buckets follow the first backward, and the replicas are compared after steps 1 and 2
WARM_UP = 2
_MOST = 200  # turns
_STEADY = 3


def main(directory: Path, seconds: float) -> None:
    settings = Settings.read(directory)
    task = resolve(settings.task, settings.overrides)
    with init(backend=backend_of(settings.device)) as world:
        began = monotonic()
        found = tune(task, settings, world, seconds)
        answer = {
            "name": task.name,
            "global_batch": task.global_batch,
            "micro_batch": task.micro_batch,
            "seconds": monotonic() - began,
            "found": found.as_json(),
            "here": {
                "device": world.device.type,
                "cpu": processor(),
                "cores": cores(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
        }
        if world.rank == 0:
            (directory / ANSWER).write_text(json.dumps(answer), encoding="utf-8")


def tune(task: Task, settings: Settings, world: World, seconds: float) -> Found:
    """Search on the open world, in about so many seconds: the same answer on all ranks. The
    settings of a knob are its default.
    """

    def say(row: KnobRow) -> None:
        if world.rank == 0:
            print(progress(row), file=sys.stderr, flush=True)

    with Trials(task, settings, world, seconds) as trials:
        default = {name: getattr(settings, name) for name in KNOBS}
        first = trials.first(default)
        return search(knobs(settings, first.training.stepper.reducer, world), trials, say)


class Trials:
    """Times points on this rank. At most two trials are alive, so that a search needs no more
    than two models' memory.
    """

    def __init__(self, task: Task, settings: Settings, world: World, seconds: float) -> None:
        self._task, self._settings, self._world = task, settings, world
        self._ends = monotonic() + seconds
        self._alive: dict[tuple[Any, ...], Trial] = {}
        self._step = 0.0  # seconds
        # seconds that a comparison takes beside its turns: models are built, perhaps compiled
        self._before = 0.0

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *exception: object) -> None:
        self._keep()

    def first(self, point: Point) -> Trial:
        """The trial of that point, after its first steps, from which it is known how long steps
        are.
        """
        began = monotonic()
        trial = self._trial(point)
        self._step = max(take_turns({"only": trial.step}, 2, self._world, warm_up=WARM_UP)["only"])
        self._before = self._beside(began, (2 + WARM_UP) * self._step)
        return trial

    def time(
        self, base: Point, candidate: Point, seconds: float
    ) -> tuple[list[float], list[float]]:
        """Raises Refused for a candidate that Lockstep refuses, which it does on all ranks
        alike.
        """
        self._keep(base, candidate)
        began = monotonic()
        turns = max(
            FEWEST,
            min(_MOST, int((seconds - self._before) / self._turn(base, candidate)) - WARM_UP),
        )
        ours = self._trial(base)
        try:
            ways = {"base": ours.step, "candidate": self._trial(candidate).step}
            found = take_turns(
                ways, turns, self._world, warm_up=WARM_UP, steady=_steady(base, candidate)
            )
        except UsageError as error:
            raise Refused(error.sentence) from error
        self._step = max(map(median, found.values()))
        self._before = self._beside(began, (turns + WARM_UP) * self._turn(base, candidate))
        return found["base"], found["candidate"]

    def left(self) -> float:
        return -largest(monotonic() - self._ends, self._world)

    def least(self, base: Point, candidate: Point) -> float:
        return self._before + (FEWEST + WARM_UP) * self._turn(base, candidate)

    def _beside(self, began: float, turns: float) -> float:
        return max(0.0, largest(monotonic() - began, self._world) - turns)

    def _turn(self, base: Point, candidate: Point) -> float:
        """Seconds of one turn of both."""
        return 2 * self._step * (1 + _steady(base, candidate))

    def _trial(self, point: Point) -> Trial:
        found = self._alive.get(_key(point))
        if found is None:
            settings = replace(self._settings, **dict(point))  # type: ignore[arg-type]
            found = self._alive[_key(point)] = Trial(self._task, settings, self._world)
        return found

    def _keep(self, *points: Point) -> None:
        """Close all other trials. Reducers and hooks refer to each other: their memory goes when
        the collector comes.
        """
        keys = [_key(point) for point in points]
        for key in [key for key in self._alive if key not in keys]:
            self._alive.pop(key).close()
        gc.collect()


def _steady(base: Point, candidate: Point) -> int:
    """Steps of a turn after one that is not timed, where their Loaders have different workers; else
    0, and each turn is a step.

    Loader workers fetch ahead: in the other trial's turn, at its cost and for nothing. In the first
    step these batches are used up, and from the second on as much is loaded as is consumed.
    """
    return _STEADY if base["loader_workers"] != candidate["loader_workers"] else 0


def _key(point: Point) -> tuple[Any, ...]:
    return tuple(point.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
