"""`run_ranks`: a world in each rank, one thread each, no trace left in the calling process."""

from __future__ import annotations

import os
import random
import sys
from contextlib import closing

import pytest
import torch

from lockstep.errors import UsageError, WorkerFailed
from lockstep.launcher import start
from lockstep.testing import run_ranks
from lockstep.world.world import World


def _describe(world: World, word: str, *, number: int) -> tuple[int, int, str, int, int]:
    assert World.current() is world
    return world.rank, world.size, word, number, torch.get_num_threads()


def test_each_rank_gets_its_world_and_one_thread() -> None:
    assert run_ranks(_describe, 3, args=("w",), kwargs={"number": 7}) == [
        (rank, 3, "w", 7, 1) for rank in range(3)
    ]


def test_one_rank_takes_the_same_path() -> None:
    assert run_ranks(_describe, 1, args=("w",), kwargs={"number": 7}) == [(0, 1, "w", 7, 1)]


def _reduce(world: World, values: torch.Tensor) -> torch.Tensor:
    mine = values[world.rank].clone()
    world.group.all_reduce(mine).wait()
    return mine


def test_ranks_talk_to_each_other() -> None:
    values = torch.randn(4, 5, dtype=torch.float64)
    for result in run_ranks(_reduce, 4, args=(values,)):
        torch.testing.assert_close(result, values.sum(0))


def _assert_two(world: World) -> None:
    assert world.size == 2, "not two"


def test_a_failed_assertion_is_raised_here_with_its_rank() -> None:
    run_ranks(_assert_two, 2)
    with pytest.raises(WorkerFailed, match=r"AssertionError: not two") as caught:
        run_ranks(_assert_two, 3)
    assert "_assert_two" in caught.value.traceback


def _draw(world: World) -> float:
    return random.random()


def test_ranks_do_not_share_the_state_of_random() -> None:
    assert len(set(run_ranks(_draw, 3))) == 3


def test_a_local_function_is_refused() -> None:
    def local(world: World) -> None: ...

    with pytest.raises(UsageError, match="<locals>"):
        run_ranks(local, 2)


def _has_torch(descriptor: int) -> None:
    os.write(descriptor, b"yes" if "torch" in sys.modules else b"no")


def test_launchers_get_a_fork_of_the_warm_server_however_many_servers_this_process_has() -> None:
    """`warm_commands` holds it, for the whole session (conftest.py)."""
    for seed in range(3):
        start.fork_server(environment={**os.environ, "PYTHONHASHSEED": str(seed)}, cold=True)
    with closing(start.ForkServer.start((), os.environ)) as server:
        assert server.answer(_has_torch) == b"yes"
