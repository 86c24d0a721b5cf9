"""Teams: ranks that stay for all tests of a module, with one world, and run functions by name.

A test that only needs a group asks for `on_team(fn, workers)`, which takes what
`lockstep.testing.run_ranks` takes. A test of how ranks start, close, die or find their environment
starts ranks of its own with `run_ranks`, and so does a test in which a rank is meant to fail.

What a function leaves in a rank fails the test. What lasts until the world closes is none of that
(groups, exact mode): the next function gets a new world. A team in which a function has failed ends,
and the next test gets a new one.
"""

from __future__ import annotations

import gc
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Concatenate, TypeVar

import torch
import torch.distributed as dist

import lockstep
from lockstep.launcher.call import FunctionCall, anonymous_file, for_ranks
from lockstep.launcher.engine import Ranks, alone
from lockstep.launcher.rank import Rank
from lockstep.launcher.start import FOR_SCRIPTS, fork_server
from lockstep.runtime.private import run_directory
from lockstep.world.world import World
from tests.leaks import children_of, nothing_left

R = TypeVar("R")

_MOST = 3
"""Teams that a module has at once. The one that has rested longest ends for another."""
_SETTLE_SECONDS = 1.0
"""How long the other ranks have to fail too, after one has."""
_IMPORTS = ("pytest", "hypothesis", "numpy", "torch.utils.data", "lockstep.step.stepper")

_WORLDS_THREAD = "lockstep collectives"

_teams: dict[int, Team] = {}
"""By the number of ranks; the one used last is last."""


class TeamFailed(Exception):
    """A function failed on a rank of a team. The message has the rank and its traceback."""


def on_team(
    fn: Callable[Concatenate[World, ...], R],
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[R]:
    """Run `fn(world, *args, **kwargs)` on the module's team of `workers` ranks.

    Args:
        fn: a function at the top of a module.
        workers: the number of ranks.
        args: positional arguments after the world; every rank gets a copy.
        kwargs: keyword arguments, likewise.

    Returns:
        What `fn` returned, by rank.

    Raises:
        TeamFailed: `fn` raised on a rank, left something behind there, or its process ended. Lists
            all ranks that failed within a second.
    """
    team = _teams.pop(workers, None)
    if team is None:
        while len(_teams) >= _MOST:
            _teams.pop(next(iter(_teams))).close()
        team = Team(workers)
    try:
        results = team.run(fn, args, kwargs or {})
    except BaseException:
        team.close()
        raise
    _teams[workers] = team
    return results


def close_teams() -> None:
    """End all teams of this process."""
    while _teams:
        _teams.popitem()[1].close()


def pids() -> set[int]:
    """Return the processes of all teams."""
    return {pid for team in _teams.values() for pid in team.pids}


class Team:
    """Ranks with one world, which wait for functions."""

    def __init__(self, workers: int) -> None:
        with ExitStack() as stack:
            server = fork_server((*FOR_SCRIPTS, *_IMPORTS))
            server.ready()
            before = children_of(server.pid)
            records = stack.enter_context(run_directory())
            place = stack.enter_context(alone(server, workers))
            pipes = [Pipe() for _ in range(workers)]
            self._connections = {rank: local for rank, (local, _) in enumerate(pipes)}
            call = FunctionCall.here()
            files = [anonymous_file() for _ in range(1 + workers)]
            handed_over = call.write(files[0], _serve, ([remote for _, remote in pipes],), {})
            ranks = stack.enter_context(Ranks(server, place))
            ranks.start(
                Rank(rank=0, work=call, records=str(records)),
                lambda rank: {},
                descriptors=lambda rank: (files[0], files[1 + rank], *handed_over),
            )
            for file in files:
                os.close(file)
            for _, remote in pipes:
                remote.close()
            self.pids = children_of(server.pid) - before
            self._stack = stack.pop_all()

    def run(self, fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[R]:
        answers = self._ask(for_ranks((fn, tuple(args), dict(kwargs))))
        self._ask(pickle.dumps(any(changed for changed, _ in answers)))
        return [result for _, result in answers]

    def _ask(self, request: bytes) -> list[Any]:
        """Send something to all ranks, and return their answers."""
        for connection in self._connections.values():
            connection.send_bytes(request)
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting := self._connections.keys() - answers.keys() - failures.keys():
            ready = wait(
                [self._connections[rank] for rank in waiting],
                timeout=_SETTLE_SECONDS if failures else None,
            )
            if not ready:
                break
            for rank in waiting:
                if self._connections[rank] in ready:
                    good, content = _answer(self._connections[rank])
                    (answers if good else failures)[rank] = content
        if failures:
            raise TeamFailed(
                "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))
            )
        return [answers[rank] for rank in sorted(answers)]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._stack.close()


def _answer(connection: Connection) -> tuple[bool, Any]:
    """Return whether all went well, and what the rank sent, or else what happened."""
    try:
        answer: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return False, "its process has ended"
    return answer


# -- in a rank -------------------------------------------------------------------------------------


def _serve(connections: Sequence[Connection]) -> None:
    """Run what the test process sends, until it closes this rank's connection."""
    world = _opened()
    for rank, connection in enumerate(connections):
        if rank != world.rank:
            connection.close()
    connection = connections[world.rank]
    while True:
        request = _received(connection)
        try:
            with nothing_left():
                fn, args, kwargs = pickle.loads(request)
                result = fn(world, *args, **kwargs)
                assert World.current() is world, "the function has closed the team's world"
                connection.send_bytes(for_ranks((True, (_changed(), result))))
                if pickle.loads(_received(connection)):
                    gc.collect()  # a Stepper of an earlier test is not to be compared with this one's
                    world.close()
                    world = _opened()
            answer = True, None
        except Exception:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))


def _received(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except EOFError:
        os._exit(0)  # at once: the other ranks may have ended already


def _opened() -> World:
    world = lockstep.init(backend="gloo")
    torch.set_num_threads(1)
    return world


def _changed() -> bool:
    """Return whether the world has what lasts until it closes: further process groups, exact mode,
    its thread for collectives in the background.
    """
    return (
        len(dist.distributed_c10d._world.pg_map) > 1
        or torch.are_deterministic_algorithms_enabled()
        or any(thread.name == _WORLDS_THREAD for thread in threading.enumerate())
    )
