"""`run_ranks`: a world in each rank, one thread each, no trace left in the calling process."""

from __future__ import annotations

import os
import random
import sys
from contextlib import closing
from typing import Any

import pytest
import torch

from lockstep.errors import UsageError, WorkerFailed
from lockstep.launcher import start
from lockstep.testing import run_ranks, warm_commands
from lockstep.world.world import World


def _describe(
    world: World, values: torch.Tensor, *, number: int
) -> tuple[Any, torch.Tensor, float]:
    assert World.current() is world
    total = values[world.rank].clone()
    world.group.all_reduce(total).wait()
    return (world.rank, world.size, number, torch.get_num_threads()), total, random.random()


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_gets_its_world_one_thread_and_random_numbers_of_its_own(size: int) -> None:
    values = torch.randn(size, 5, dtype=torch.float64)
    described, totals, drawn = zip(
        *run_ranks(_describe, size, args=(values,), kwargs={"number": 7}), strict=True
    )
    assert list(described) == [(rank, size, 7, 1) for rank in range(size)]
    for total in totals:
        torch.testing.assert_close(total, values.sum(0))
    assert len(set(drawn)) == size


def _fails_on_rank_1(world: World) -> None:
    assert world.rank != 1, "it is rank 1"


def test_a_failed_assertion_is_raised_here_with_its_rank() -> None:
    with pytest.raises(WorkerFailed, match=r"AssertionError: it is rank 1") as caught:
        run_ranks(_fails_on_rank_1, 2)
    assert caught.value.rank == 1
    assert "_fails_on_rank_1" in caught.value.traceback


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


def test_a_fork_of_a_warm_server_is_not_used_after_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "_servers", {})
    with warm_commands():
        inside = start.fork_server()
        assert inside.answer(_has_torch) == b"yes"
    assert not start._servers
    assert not inside.alive
    assert start.fork_server().answer(_has_torch) == b"yes"
    start.close_all()
