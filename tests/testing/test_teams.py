"""Teams of tests: one world for many functions, what a function leaves is seen, and what fails ends."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from lockstep.world.world import World
from tests.teams import TeamFailed, on_team


def described(world: World, word: str, *, number: int) -> tuple[int, int, int, str, int]:
    return os.getpid(), world.rank, world.size, word, number


def total(world: World, values: torch.Tensor) -> torch.Tensor:
    mine = values[world.rank].clone()
    world.group.all_reduce(mine).wait()
    return mine


def test_the_same_ranks_run_all_functions_of_a_size() -> None:
    first = on_team(described, 3, ("w",), {"number": 7})
    assert [each[1:] for each in first] == [(rank, 3, "w", 7) for rank in range(3)]
    assert on_team(described, 3, ("w",), {"number": 7}) == first
    assert {each[0] for each in on_team(described, 2, ("w",), {"number": 7})}.isdisjoint(
        each[0] for each in first
    )
    values = torch.randn(3, 5, dtype=torch.float64)
    for result in on_team(total, 3, (values,)):
        torch.testing.assert_close(result, values.sum(0))


def leaves(world: World, what: str) -> None:
    if world.rank == 1:
        if what == "environment":
            os.environ["LEFT"] = "1"
        elif what == "threads":
            threading.Thread(target=signal.pause, daemon=True, name="left").start()
        elif what == "process groups":
            dist.new_group([1], use_local_synchronization=True)
        elif what == "dtype":
            torch.set_default_dtype(torch.float64)
        elif what == "children" and os.fork() == 0:
            signal.pause()


@pytest.mark.parametrize("what", ["environment", "threads", "process groups", "dtype", "children"])
def test_what_a_function_leaves_behind_fails_its_test(what: str) -> None:
    on_team(leaves, 2, ("",))
    with pytest.raises(TeamFailed, match=rf"rank 1: (?s:.)*left behind: .*'{what}'"):
        on_team(leaves, 2, (what,))


def fails(world: World, how: str) -> None:
    if world.rank == 1 and how == "raises":
        raise ValueError("boom")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total(world, torch.ones(2, 1))


def test_a_team_in_which_a_function_fails_ends_and_another_is_made() -> None:
    before = on_team(described, 2, ("w",), {"number": 7})
    with pytest.raises(TeamFailed, match=r"rank 1: (?s:.)*in fails\n(?s:.)*ValueError: boom"):
        on_team(fails, 2, ("raises",))
    after = on_team(described, 2, ("w",), {"number": 7})
    assert {each[0] for each in before}.isdisjoint(each[0] for each in after)
    with pytest.raises(TeamFailed, match="rank 1: its process has ended"):
        on_team(fails, 2, ("is killed",))
