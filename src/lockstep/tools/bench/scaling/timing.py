"""Times several worlds on one host in turns. Each world is a team of ranks, and one team computes
at a time.

Each team is a world as `lockstep train --workers N` would open it, with its own share of the cores,
its own groups and memory. All teams are started once and stay alive: a turn then takes about a
second, instead of the many seconds to start and warm up. The shorter the turns, the more equally
other load on the machine affects all teams. A rank that waits for its turn reads from a socket, for
a key in the launcher's store: it uses memory but no core.

A turn starts with one untimed step, which fills the caches again and uses up the batches that
loader workers fetched during other turns. Then come the timed steps. All ranks start together, and
the GPU is synchronized before and after; the time of the slowest rank counts. Before the timed
turns, every work has one turn to warm up: buckets follow the first backward, kernels are chosen,
replicas are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.errors import WorkerFailed
from lockstep.launcher.launch import start_ranks
from lockstep.runtime.private import run_directory
from lockstep.tools.bench.scaling.prediction import Carried, carried, link_of
from lockstep.tools.bench.scaling.works import TimedWork, order_of_turns
from lockstep.tools.timing.in_turns import Trial, take_turns
from lockstep.training.opening import backend_of, computing
from lockstep.world.world import World, init

R = TypeVar("R")

_IMPORTS = ("lockstep.training.train", "lockstep.tools.bench.scaling.timing")
_AS_LONG_AS_IT_TAKES = timedelta(days=365)


class TeamTurns:
    """Lets one rank wait for the turns of its team. All ranks of all teams number the turns alike,
    from 0.
    """

    def __init__(self, port: int, ranks: int, *, leads: bool, rendezvous: str) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=_AS_LONG_AS_IT_TAKES
        )
        self._ranks, self._leads = ranks, leads
        self.rendezvous = rendezvous
        """The `init_method` of the team's world."""

    def ready(self) -> None:
        """Report that this rank is ready. The first turn begins when every rank has called it."""
        if self._store.add("ready", 1) == self._ranks:
            self._store.set(_key(0), "")

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait for turn `number`, then run the block. The block must end with a barrier of the
        team's ranks, because the first of them starts the next turn.
        """
        self.wait_for(number)
        yield
        if self._leads:
            self._store.set(_key(number + 1), "")

    def wait_for(self, number: int) -> None:
        """Wait until turn `number` begins. With the number of all turns, wait until all are over: a
        world that closes earlier would disturb the others.
        """
        self._store.wait([_key(number)], _AS_LONG_AS_IT_TAKES)


def _key(number: int) -> str:
    return f"turn/{number}"


def run_teams(fn: Callable[..., R], sizes: Sequence[int], args: Sequence[Any]) -> list[R]:
    """Run `fn(turns, *args)` on teams of these sizes, and return the result of each team's first
    rank. In `fn`, `init(init_method=turns.rendezvous)` opens the team's world.

    Raises:
        UsageError: a function or argument that cannot be sent to new processes.
        WorkerFailed: a rank failed; the message names its team. All others have been killed.
    """
    try:
        with run_directory() as directory:
            found = start_ranks(
                _seated,
                sum(sizes),
                (fn, tuple(sizes), directory, *args),
                {},
                timeout=None,
                imports=_IMPORTS,
            )
    except WorkerFailed as error:
        team, rank = seat(sizes, error.rank)
        said = str(error).removeprefix(f"rank {error.rank}")
        named = f"rank {rank} of {sizes[team]}{said}"
        raise WorkerFailed(named, rank=rank, traceback=error.traceback) from None
    return [found[sum(sizes[:team])] for team in range(len(sizes))]


def seat(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return (team, rank in the team) of a rank among all ranks that were started."""
    team = 0
    while rank >= sizes[team]:
        rank -= sizes[team]
        team += 1
    return team, rank


def _seated(fn: Callable[..., R], sizes: Sequence[int], directory: Path, *args: Any) -> R:
    """Set the environment to this rank's place in its team, for `init()`, and call `fn`."""
    team, rank = seat(sizes, int(os.environ["RANK"]))
    turns = TeamTurns(
        int(os.environ["MASTER_PORT"]),
        sum(sizes),
        leads=rank == 0,
        rendezvous=f"file://{directory}/team-{team}",
    )
    size = str(sizes[team])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    return fn(turns, *args)


WARM_UP = 3  # steps
_HELD = 4  # windows that are repeated if loading is not timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """The result of a team, from its first rank."""

    turns: dict[int, list[tuple[int, float]]]
    """(samples of all ranks, seconds) of every timed turn, by the number of the work."""
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
    """Run the turns of this rank. Every rank of every team calls it with the same arguments.
    `links`: the size of the team that measures the link between ranks.
    """
    task = source()
    with (
        init(backend=backend_of(settings.device), init_method=turns.rendezvous) as world,
        computing(settings, world),
    ):
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
    """Return the samples and seconds of `steps` steps, after an untimed one; the same on all
    ranks.
    """
    samples: list[int] = []
    ways = {"step": lambda: samples.append(trial.step())}
    seconds = take_turns(ways, 1, world, warm_up=0, steady=steps)["step"][0]
    return sum(samples[1:]), steps * seconds
