"""Teams of tests: one world for many functions, what a function leaves is seen, and what fails ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.world.world import World
from tests.leaks import LeftBehind, nothing_left
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


def leave(what: str) -> None:
    if what == "environment variable LEFT":
        os.environ["LEFT"] = "1"
    elif what == "thread 'left'":
        END.clear()
        threading.Thread(target=END.wait, daemon=True, name="left").start()
    elif what == "process":
        multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True).start()
    elif what == "shared memory lockstep-left":
        Path("/dev/shm/lockstep-left").touch()
    elif what == "an open process group":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif what == "torch's default dtype":
        torch.set_default_dtype(torch.float64)


END = threading.Event()


def clear(what: str) -> None:
    """What `nothing_left` does not clear away itself."""
    END.set()
    torch.set_default_dtype(torch.float32)
    Path("/dev/shm/lockstep-left").unlink(missing_ok=True)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "what",
    [
        "environment variable LEFT",
        "thread 'left'",
        "process",
        "shared memory lockstep-left",
        "an open process group",
        "torch's default dtype",
    ],
)
def test_what_is_left_behind_is_named(what: str) -> None:
    try:
        with pytest.raises(LeftBehind, match=f"left behind: {what}"), nothing_left(patience=0.0):
            leave(what)
    finally:
        clear(what)
    with nothing_left():
        pass


def leaves(world: World) -> None:
    if world.rank == 1:
        os.environ["LEFT"] = "1"


def test_what_a_function_leaves_on_a_rank_fails_its_test() -> None:
    with pytest.raises(TeamFailed, match=r"rank 1: (?s:.)*left behind: environment variable LEFT"):
        on_team(leaves, 2)


def changes(world: World) -> tuple[int, bool]:
    before = len(dist.distributed_c10d._world.pg_map), torch.are_deterministic_algorithms_enabled()
    if world.rank != 1:
        world.subgroup([0, 2])
        world.compute_deterministically()
    return before


def test_what_lasts_until_the_world_closes_is_not_there_in_the_next_test() -> None:
    for _ in range(3):
        assert on_team(changes, 3) == [(1, False)] * 3


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
