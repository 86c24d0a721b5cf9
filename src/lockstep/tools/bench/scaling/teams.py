"""Several worlds on one host, of which one computes at a time: teams of ranks that take turns.

Each team is a world of its own, as `lockstep train --workers N` would open it, with its own share
of the cores, its own groups and memory. They are started once and live side by side, because a turn
should last a second, not the many that starting and warming up take: the finer the turns, the more
alike what else the machine does falls on all. A rank whose team is not in turn waits for a key in
the launcher's store, in a read of a socket: it takes no core, only its memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lockstep.errors import WorkerFailed
from lockstep.launcher.launch import start_ranks
from lockstep.runtime.host_store import HostStore

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
