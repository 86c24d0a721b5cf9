"""init, and what ranks agree on through their World."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import BarrierTimeout, LockstepError, LockstepWarning, UsageError
from lockstep.testing import run_ranks
from tests.refused import refused


def test_plain_python_is_a_world_of_one() -> None:
    with lockstep.init() as world:
        assert (world.rank, world.size, world.local_rank, world.local_size, world.node) == (
            0,
            1,
            0,
            1,
            0,
        )
        assert world.device == torch.device("cpu")
        assert world.agree(True)
        assert not world.agree(False, "all")
        assert world.mean(3.0, 2.0) == 3.0
        world.barrier()
        with world.first() as mine:
            assert mine
        assert lockstep.World.current() is world
    assert not dist.is_initialized()


def test_a_second_call_returns_the_open_world_or_refuses_other_arguments() -> None:
    with lockstep.init() as world:
        assert lockstep.init() is world
        assert lockstep.init(rank=0, world_size=1, backend="gloo") is world
        assert lockstep.init(device="cpu") is world
        with refused("process-group-already-open", name="device", value="cuda"):
            lockstep.init(device="cuda")
        with refused("process-group-already-open", name="world_size", value=2) as caught:
            lockstep.init(rank=0, world_size=2)
        assert "world_size=1" in caught.value.values["current"]


def test_a_plain_call_is_closed_by_hand_and_twice_does_no_harm() -> None:
    world = lockstep.init()
    world.close()
    world.close()
    assert not dist.is_initialized()


def test_a_world_closes_what_it_owns_last_in_first_out() -> None:
    closed: list[str] = []

    class Resource:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    with lockstep.init() as world:
        world.own(Resource("segment"))
        world.own(Resource("thread"))
    assert closed == ["thread", "segment"]


def test_a_process_group_of_the_user_is_adopted_and_never_closed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with lockstep.init() as world:
            assert world.adopted
            assert world.agree(True)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        ({"rank": 1}, "incomplete-settings", {"given": "rank=1", "lacking": "world_size"}),
        (
            {"world_size": 2},
            "incomplete-settings",
            {"given": "world_size=2", "lacking": "rank"},
        ),
        (
            {"rank": 2, "world_size": 2},
            "rank-out-of-range",
            {"name": "rank", "value": 2, "size_name": "world_size", "size": 2},
        ),
        (
            {"rank": 0, "world_size": 0},
            "wrong-value",
            {"name": "world_size", "value": 0},
        ),
        ({"backend": "mpi"}, "torch-without-mpi", {}),
        ({"backend": "tcp"}, "unknown-choice", {"name": "backend", "value": "tcp"}),
        ({"device": "meta"}, "unknown-choice", {"name": "device", "value": "meta"}),
    ],
)
def test_contradictory_arguments_are_refused(
    arguments: dict[str, object], code: str, values: dict[str, object]
) -> None:
    with refused(code, **values):
        lockstep.init(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments", [{"backend": "nccl"}, {"device": "cuda"}, {"backend": "gloo", "device": "cuda:1"}]
)
def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused("no-gpu-visible"):
        lockstep.init(**arguments)


def test_more_local_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with refused("more-ranks-than-gpus", local_rank=2, gpus=2):
        lockstep.init()


def agreements(world: lockstep.World) -> tuple[bool, bool, bool, float, int]:
    return (
        world.agree(world.rank == 1),
        world.agree(True, "all"),
        world.agree(world.rank != 1, "all"),
        world.mean(float(world.rank), weight=float(world.rank)),
        torch.get_num_threads(),
    )


def test_ranks_agree_and_average_by_weight() -> None:
    assert run_ranks(agreements, 3) == [(True, True, False, (1 * 1 + 2 * 2) / 3, 1)] * 3


def mean_of_nothing(world: lockstep.World) -> float:
    with refused("wrong-value", name="weight", value=-1.0):
        world.mean(1.0, -1.0)
    return world.mean(float("nan"), 0.0)


def test_a_mean_over_nothing_is_nan_and_a_weightless_nan_does_no_harm() -> None:
    assert all(value != value for value in run_ranks(mean_of_nothing, 2))


def late_at_a_barrier(world: lockstep.World, flag: str) -> tuple[tuple[int, ...], str]:
    world.barrier()
    if world.rank == 1:
        while not os.path.exists(flag):  # late until another rank has given up
            time.sleep(0.01)
    try:
        world.barrier(timeout=timedelta(seconds=3))
    except BarrierTimeout as error:
        if world.rank == 0:
            open(flag, "w").close()
        return error.missing, str(error)
    raise AssertionError("the barrier let a late rank pass")


def test_a_late_rank_is_named_on_all_ranks_also_on_itself(tmp_path: Path) -> None:
    found = run_ranks(late_at_a_barrier, 3, args=(str(tmp_path / "given-up"),))
    assert [missing for missing, _ in found] == [(1,)] * 3
    sentence = "rank 1 of 3 did not reach the barrier within 3 s"
    assert all(said.startswith(sentence) for _, said in found)
    assert found[0][1].endswith("[barrier-timeout]")
    assert found[1][1].endswith("[barrier-came-late]")


def takes_turns(world: lockstep.World, path: str) -> str:
    with world.first() as mine:
        if mine:
            with open(path, "w") as file:
                file.write("prepared")
        with open(path) as file:
            return file.read()


def test_rank_0_goes_first(tmp_path: Path) -> None:
    assert run_ranks(takes_turns, 3, args=(str(tmp_path / "data"),)) == ["prepared"] * 3


def fails_first(world: lockstep.World) -> str:
    try:
        with world.first() as mine:
            if mine:
                raise KeyError("no such file")
    except (KeyError, LockstepError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def test_the_others_learn_that_rank_0_failed() -> None:
    found = run_ranks(fails_first, 3)
    assert found[0] == "KeyError: 'no such file'"
    assert (
        found[1]
        == "PeerFailed: rank 1 waited in world.first() for rank 0, which failed there: KeyError: 'no such"
        " file'. Fix the error of rank 0. [peer-failed-in-first]"
    )


def cycles(world: lockstep.World, count: int) -> int:
    size = world.size
    world.close()
    for number in range(count):
        with lockstep.init() as inner:
            assert inner.mean(float(inner.rank), 1.0) == (size - 1) / 2, number
    return count


def test_twenty_start_stop_cycles_of_eight_ranks_without_an_abort() -> None:
    assert run_ranks(cycles, 8, args=(20,)) == [20] * 8


SIBLING = """
import sys, lockstep
with lockstep.init(rank=int(sys.argv[1]), world_size=3) as world:
    print(world.mean(float(world.rank), 1.0), world.local_size)
"""


def test_ranks_that_the_user_spawned_find_each_other_without_an_address() -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SIBLING, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    assert [rank.communicate()[0] for rank in ranks] == ["1.0 3\n"] * 3
    assert [rank.returncode for rank in ranks] == [0] * 3


FORK = """
import gc, os, lockstep, torch.distributed as dist

def collect():
    gc.set_threshold(1, 1, 1)
    kept = [[number] for number in range(100)]

if {early}:
    os.register_at_fork(after_in_child=collect)
gc.set_threshold(10**9)
with lockstep.init(backend="gloo"):
    garbage = [dist.group.WORLD]
    garbage.append(garbage)
    dist.barrier()
del garbage
child = os.fork()
if child == 0:
    collect()
    os._exit(7 if gc.isenabled() else 8)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gc.isenabled(), flush=True)
"""


# a hook of another module collects before those of this one are called
@pytest.mark.parametrize("early", [False, True])
def test_a_forked_child_does_not_tear_down_a_group_that_was_left_for_collection(
    early: bool,
) -> None:
    told = subprocess.run(
        [sys.executable, "-c", FORK.format(early=early)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert told.stdout == "7 True\n"


def test_forking_leaves_a_collector_off_that_was_off() -> None:
    with lockstep.init():
        gc.disable()
        try:
            child = os.fork()
            if child == 0:
                os._exit(int(gc.isenabled()))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert not gc.isenabled()
        finally:
            gc.enable()


def test_the_launchers_timeout_counts_where_none_is_given_and_one_that_nobody_reads_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_TIMEOUT", "7.5")
    with lockstep.init() as world:
        assert world.timeout == timedelta(seconds=7.5)
    with lockstep.init(timeout=timedelta(seconds=3)) as world:
        assert world.timeout == timedelta(seconds=3)
    monkeypatch.setenv("NCCL_TIMEOUT", "60")
    with (
        pytest.warns(
            LockstepWarning,
            match="NCCL_TIMEOUT=60 is set, but neither NCCL nor torch reads it; use --timeout",
        ),
        lockstep.init(),
    ):
        pass


def destroys_inside(world: lockstep.World, used_after: bool) -> None:
    part = world.subgroup(range(world.size))
    world.mean(1.0, 1.0)
    dist.destroy_process_group()
    if used_after:
        for use in (
            lambda: world.mean(1.0, 1.0),
            world.barrier,
            lambda: lockstep.collectives.all_reduce(torch.ones(2), group=part),
        ):
            with pytest.raises(UsageError, match=r"#\d+.*destroy_process_group"):
                use()
        for find in (
            lambda: lockstep.collectives.all_reduce(torch.ones(2)),
            lockstep.World.current,
        ):
            with pytest.raises(UsageError, match="destroy_process_group"):
                find()


@pytest.mark.parametrize("used_after", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_group_that_the_program_destroyed(workers: int, used_after: bool) -> None:
    """Not missed at the end of the world, as torch's examples end; named where something comes
    after it.
    """
    run_ranks(destroys_inside, workers, args=(used_after,))


def test_a_world_left_open_whose_group_the_program_destroyed() -> None:
    code = (
        "import lockstep, torch.distributed as dist; lockstep.init(); dist.destroy_process_group();"
        " lockstep.init(); dist.destroy_process_group()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
