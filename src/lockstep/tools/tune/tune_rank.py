"""`python -m lockstep.tools.tune.tune_rank DIR SECONDS`: one rank of `lockstep tune`. It starts
from the settings in DIR/settings.json.

Rank 0 prints every comparison on stderr as soon as it is known, and writes DIR/answer.json. The
knobs change nothing of the training beyond the last bits of a sum; those with likely gains come
first. The search's Bench is Trials. It builds a trial when it is first needed, and all ranks decide
alike.

`micro_batch` is not a knob, because it changes the training (micro_batch.py gives advice on it).
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.errors import UsageError
from lockstep.gradients.layout import FIRST_BUCKET, Entry, plan
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import SharedMemory
from lockstep.runtime.cores import cores, processor
from lockstep.tools.timing.in_turns import Trial, largest, take_turns
from lockstep.tools.tune.search import Found, KnobRow, Point, Refused, Tunable, Value, search
from lockstep.tools.tune.table import progress
from lockstep.training.opening import backend_of
from lockstep.training.resolve import resolve
from lockstep.training.tuned import KNOBS
from lockstep.world.world import World, init

_BUCKETS: tuple[float, ...] = (1, 5, 100)
_LOADER_WORKERS = (1, 2)
Tried = tuple[Value, ...] | str
"""The values to try beside the default, or the reason why there are none."""


def knobs(default: Settings, reducer: Reducer, world: World) -> list[Tunable]:
    """Return all knobs. `reducer` is that of the default settings, and torch now uses their number
    of intra-op threads.
    """
    tried = {
        "reduce": _reduces(reducer, world),
        "update": "one rank has no other rank to share with" if world.size == 1 else ("sharded",),
        "threads": _threads(world) or "one core a rank",
        "loader_workers": _LOADER_WORKERS,
        "bucket_mb": _buckets(default, reducer, world),
    }
    return [
        (
            Tunable(name=name, default=getattr(default, name), reason=others)
            if isinstance(others, str)
            else Tunable(name=name, default=getattr(default, name), others=others)
        )
        for name, others in tried.items()
    ]


def _reduces(reducer: Reducer, world: World) -> Tried:
    """Return the other one of the two fast reductions. "central" is the naive reference and never
    fast.
    """
    if world.size == 1:
        return "one rank has nothing to sum"
    if world.group.memory is None:
        return "only the backend is possible: shared memory needs ranks on the CPU of one host"
    return ("native" if isinstance(reducer.reduction, SharedMemory) else "shared_memory",)


def _threads(world: World) -> tuple[Value, ...]:
    """Return powers of two up to a rank's share of the cores. More threads would take cores from
    other ranks.
    """
    share = max(1, cores() // world.local_size)
    found = {2**power for power in range(share.bit_length())} | {share}
    return tuple(sorted(found - {torch.get_num_threads()}, reverse=True))


def _buckets(default: Settings, reducer: Reducer, world: World) -> Tried:
    """Return the sizes that put the gradients into other buckets than the default.

    With the native reduction a bucket is sent during the backward: small buckets go early, large
    ones have less latency. With shared memory all buckets are summed at the end, each between two
    synchronizations, so the size matters little. It is tried anyway, because it costs one
    comparison.
    """
    if world.size == 1:
        return "one rank sends nothing"
    seen, others = [_cuts(reducer, default.bucket_mb)], []
    for size in _BUCKETS:
        if (cuts := _cuts(reducer, size)) not in seen:
            seen.append(cuts)
            others.append(size)
    same = (
        f"all other sizes put the {reducer.layout.bytes / 2**20:.1f} MiB of gradients into the"
        " same buckets"
    )
    return tuple(others) or same


def _cuts(reducer: Reducer, bucket_mb: float) -> list[int]:
    """Return the number of elements in each bucket for a bucket size."""
    entries = [
        Entry(name, parameter.numel(), parameter.dtype, parameter.device)
        for name, parameter in zip(reducer.names, reducer.parameters, strict=True)
    ]
    size = int(bucket_mb * 2**20)
    layout = plan(entries, reducer.layout.order, bucket=size, first_bucket=min(FIRST_BUCKET, size))
    return [bucket.numel for bucket in layout.buckets]


ANSWER = "answer.json"
FEWEST = 3  # turns
# turns: buckets are planned after the first backward, replicas are compared after steps 1 and 2
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
            "found": asdict(found),
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
    """Search on all ranks of `world` for about `seconds`, and return the same answer on all. A
    knob's default is its value in `settings`.
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
        # seconds of a comparison outside its turns: models are built, perhaps compiled
        self._before = 0.0

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *exception: object) -> None:
        self._keep()

    def first(self, point: Point) -> Trial:
        """Return the trial of a point, after first steps that show how long a step takes."""
        began = monotonic()
        trial = self._trial(point)
        self._step = max(take_turns({"only": trial.step}, 2, self._world, warm_up=WARM_UP)["only"])
        self._before = self._beside(began, (2 + WARM_UP) * self._step)
        return trial

    def time(
        self, base: Point, candidate: Point, seconds: float
    ) -> tuple[list[float], list[float]]:
        """Time turns of both points. Raises Refused for a candidate that Lockstep refuses; it
        refuses on all ranks alike.
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
        """Return the seconds of one turn of both points."""
        return 2 * self._step * (1 + _steady(base, candidate))

    def _trial(self, point: Point) -> Trial:
        found = self._alive.get(_key(point))
        if found is None:
            settings = replace(self._settings, **dict(point))  # type: ignore[arg-type]
            found = self._alive[_key(point)] = Trial(self._task, settings, self._world)
        return found

    def _keep(self, *points: Point) -> None:
        """Close all other trials. Reducers and hooks refer to each other, so only the garbage
        collector frees their memory.
        """
        keys = [_key(point) for point in points]
        for key in [key for key in self._alive if key not in keys]:
            self._alive.pop(key).close()
        gc.collect()


def _steady(base: Point, candidate: Point) -> int:
    """Return the timed steps of a turn if the Loaders have different numbers of workers. A step
    that is not timed comes before them. Otherwise return 0: a turn is one step.

    Loader workers fetch batches ahead, also during the other trial's turn and at its cost. The
    first step uses up these batches; from the second step on, workers load as much as is consumed.
    """
    return _STEADY if base["loader_workers"] != candidate["loader_workers"] else 0


def _key(point: Point) -> tuple[Any, ...]:
    return tuple(point.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
