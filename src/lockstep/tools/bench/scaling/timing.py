"""Several worlds on one host, of which one computes at a time: teams of ranks that take turns.

Each team is a world of its own, as `lockstep train --workers N` would open it, with its own share
of the cores, its own groups and memory. They are started once and live side by side, because a turn
should last a second, not the many that starting and warming up take: the finer the turns, the more
alike what else the machine does falls on all. A rank whose team is not in turn waits for a key in
the launcher's store, in a read of a socket: it takes no core, only its memory.

A turn takes one step that is not timed, in which caches fill again and what loader workers fetched
in others' turns is used up, then the timed steps in a row. A GPU is waited for at both borders, and
all ranks begin together; the slowest rank's time counts. Before the first turn that counts, every
piece of work has a turn of its own to warm up: buckets follow the first backward, kernels are
chosen, replicas compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.errors import WorkerFailed
from lockstep.launcher.launch import start_ranks
from lockstep.runtime.host_store import HostStore
from lockstep.tools.bench.scaling.prediction import Carried, carried, link_of
from lockstep.tools.bench.scaling.works import TimedWork, order_of_turns
from lockstep.tools.timing.in_turns import Trial, take_turns
from lockstep.training.opening import backend_of, computing
from lockstep.world.world import World, init

R = TypeVar("R")

_IMPORTS = ("lockstep.training.train", "lockstep.tools.bench.scaling.timing")
_AS_LONG_AS_IT_TAKES = timedelta(days=365)


class TeamTurns:
    """One rank's view of whose turn it is. All ranks of all teams number the turns alike, from
    0.
    """

    def __init__(self, port: int, ranks: int, *, leads: bool) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=_AS_LONG_AS_IT_TAKES
        )
        self._ranks, self._leads = ranks, leads

    def ready(self) -> None:
        """Called once by every rank: the first turn begins when all have."""
        if self._store.add("ready", 1) == self._ranks:
            self._store.set(_key(0), "")

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait for turn `number` and compute in it. Its team's ranks must have met at the
        block's end: the first of them passes the turn on.
        """
        self.wait_for(number)
        yield
        if self._leads:
            self._store.set(_key(number + 1), "")

    def wait_for(self, number: int) -> None:
        """Until that turn has come, or as the number of all turns, until they are over: a world
        that closes earlier would disturb the rest.
        """
        self._store.wait([_key(number)], _AS_LONG_AS_IT_TAKES)


def _key(number: int) -> str:
    return f"turn/{number}"


def run_teams(fn: Callable[..., R], sizes: Sequence[int], args: Sequence[Any]) -> list[R]:
    """Run `fn(turns, *args)` on teams of so many ranks, and return what the first rank of each
    returned. In it, `init()` opens the team's world.

    Raises:
        UsageError: a function or argument that new processes cannot be given.
        WorkerFailed: a rank failed; the message names its team. All others have been killed.
    """
    stores = [HostStore() for _ in sizes]
    try:
        found = start_ranks(
            _seated,
            sum(sizes),
            (fn, tuple(sizes), [store.port for store in stores], *args),
            {},
            timeout=None,
            imports=_IMPORTS,
        )
    except WorkerFailed as error:
        team, rank = seat(sizes, error.rank)
        said = str(error).removeprefix(f"rank {error.rank}")
        named = f"rank {rank} of {sizes[team]}{said}"
        raise WorkerFailed(named, rank=rank, traceback=error.traceback) from None
    finally:
        for store in stores:
            store.close()
    return [found[sum(sizes[:team])] for team in range(len(sizes))]


def seat(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """(team, rank in it) of a rank among all that were started."""
    team = 0
    while rank >= sizes[team]:
        rank -= sizes[team]
        team += 1
    return team, rank


def _seated(fn: Callable[..., R], sizes: Sequence[int], ports: Sequence[int], *args: Any) -> R:
    """Take the place in the team, which is what `init()` looks for in the environment."""
    team, rank = seat(sizes, int(os.environ["RANK"]))
    turns = TeamTurns(int(os.environ["MASTER_PORT"]), sum(sizes), leads=rank == 0)
    size = str(sizes[team])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        MASTER_PORT=str(ports[team]),
    )
    return fn(turns, *args)


WARM_UP = 3  # steps
_HELD = 4  # windows that are gone round in where loading is not timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """What the first rank of a team has to say."""

    turns: dict[int, list[tuple[int, float]]]
    """By number of the work: samples, of all ranks, and seconds of every turn that counts."""
    carried: Carried


def on_rank(
    turns: TeamTurns,
    source: Callable[[], Task],
    settings: Settings,
    works: Sequence[TimedWork],
    steps: int,
    rounds: int,
    loading: bool,
    links: int | None,
) -> Timed:
    """Called on every rank of every team with the same arguments. `links`: the size of the team
    that measures the link between ranks.
    """
    task = source()
    with init(backend=backend_of(settings.device)) as world, computing(settings, world):
        mine = [number for number, work in enumerate(works) if work.workers == world.size]
        first = replace(task, global_batch=works[mine[0]].global_batch)
        trial = Trial(first, replace(settings, workers=world.size), world)
        ready = {
            number: trial.beside(work.global_batch, work.threads, held=0 if loading else _HELD)
            for number, work in enumerate(works)
            if number in mine
        }
        link = None
        found: dict[int, list[tuple[int, float]]] = {number: [] for number in mine}
        turns.ready()
        order = order_of_turns(len(works), rounds)
        for turn, number in enumerate(order):
            if number not in mine:
                continue
            with turns.turn(turn):
                if turn >= len(works):
                    found[number].append(timed(ready[number], steps, world))
                    continue
                timed(ready[number], WARM_UP - 1, world)
                if world.size == links:
                    link = link_of(world, trial.training.stepper.reducer.reduction)
        turns.wait_for(len(order))
        for each in ready.values():
            each.close()
        return Timed(turns=found, carried=carried(trial.training, link))


def timed(trial: Trial, steps: int, world: World) -> tuple[int, float]:
    """Samples and seconds of so many steps, after one that is not timed; the same on all ranks."""
    samples: list[int] = []
    ways = {"step": lambda: samples.append(trial.step())}
    seconds = take_turns(ways, 1, world, warm_up=0, steady=steps)["step"][0]
    return sum(samples[1:]), steps * seconds
