"""init, and what ranks agree on through their World."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import BarrierTimeout, LockstepWarning, PeerFailed, UsageError
from lockstep.testing import run_ranks
from tests.refused import refused
from tests.teams import on_team


def test_plain_python_is_a_world_of_one() -> None:
    with lockstep.init() as world:
        assert (world.rank, world.local_rank, world.node) == (0, 0, 0)
        assert (world.size, world.local_size) == (1, 1)
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


def test_a_world_closes_what_it_owns_last_in_first_out_and_once() -> None:
    closed: list[str] = []

    class Resource:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    world = lockstep.init()
    world.own(Resource("segment"))
    world.own(Resource("thread"))
    world.close()
    world.close()
    assert closed == ["thread", "segment"]
    assert not dist.is_initialized()


def test_a_process_group_of_the_user_is_adopted_and_never_closed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with lockstep.init() as world:
            assert world.adopted
            assert world.agree(True)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_contradictory_arguments_are_refused() -> None:
    outside = {"name": "rank", "value": 2, "size": 2}
    cases: list[tuple[dict[str, Any], str, dict[str, object]]] = [
        ({"rank": 1}, "incomplete-settings", {"given": "rank=1", "lacking": "world_size"}),
        ({"world_size": 2}, "incomplete-settings", {"given": "world_size=2", "lacking": "rank"}),
        ({"rank": 2, "world_size": 2}, "rank-out-of-range", outside),
        ({"rank": 0, "world_size": 0}, "wrong-value", {"name": "world_size", "value": 0}),
        ({"backend": "mpi"}, "torch-without-mpi", {}),
        ({"backend": "tcp"}, "unknown-choice", {"name": "backend", "value": "tcp"}),
        ({"device": "meta"}, "unknown-choice", {"name": "device", "value": "meta"}),
    ]
    for arguments, code, values in cases:
        with refused(code, **values):
            lockstep.init(**arguments)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend, device in (("nccl", None), (None, "cuda"), ("gloo", "cuda:1")):
        with refused("no-gpu-visible"):
            lockstep.init(backend=backend, device=device)


def test_more_local_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")
        monkeypatch.setenv(name.replace("RANK", "WORLD_SIZE"), "4")
    with refused("more-ranks-than-gpus", local_rank=2, gpus=2):
        lockstep.init()


def agreements(world: lockstep.World) -> tuple[bool, bool, bool, float]:
    with refused("wrong-value", name="weight", value=-1.0):
        world.mean(1.0, -1.0)
    assert math.isnan(world.mean(float("nan"), 0.0))  # over nothing
    return (
        world.agree(world.rank == 1),
        world.agree(True, "all"),
        world.agree(world.rank != 1, "all"),
        world.mean(float("nan") if world.rank == 0 else world.rank, weight=float(world.rank)),
    )


def test_ranks_agree_and_average_by_weight() -> None:
    assert on_team(agreements, 3) == [(True, True, False, (1 * 1 + 2 * 2) / 3)] * 3


def late_at_a_barrier(world: lockstep.World) -> tuple[tuple[int, ...], str, str]:
    world.barrier()
    if world.rank == 1:  # late until another rank has given up
        world._store.wait(["the barrier was given up"], timedelta(minutes=5))
    with pytest.raises(BarrierTimeout) as caught:
        world.barrier(timeout=timedelta(seconds=3))
    if world.rank == 0:
        world._store.set("the barrier was given up", "")
    return caught.value.missing, caught.value.code, str(caught.value)


def test_a_late_rank_is_named_on_all_ranks_also_on_itself() -> None:
    codes = ["barrier-timeout", "barrier-came-late", "barrier-timeout"]
    results = on_team(late_at_a_barrier, 3)
    for (missing, raised, message), code in zip(results, codes, strict=True):
        assert (missing, raised) == ((1,), code)
        assert message.startswith("rank 1 of 3 did not reach the barrier within 3 s")


def fail_first(world: lockstep.World) -> None:
    with world.first() as mine:
        if mine:
            raise KeyError("no such file")


def goes_first(world: lockstep.World, path: str) -> tuple[str, str, dict[str, Any]]:
    """Rank 0 writes a file for all; then it fails."""
    with world.first() as mine:
        if mine:
            Path(path).write_text("prepared")
        text = Path(path).read_text()
    with pytest.raises((KeyError, PeerFailed)) as caught:
        fail_first(world)
    return text, caught.type.__name__, getattr(caught.value, "values", {})


def test_rank_0_goes_first_and_the_others_learn_that_it_failed(tmp_path: Path) -> None:
    first, *others = on_team(goes_first, 3, (str(tmp_path / "data"),))
    assert first == ("prepared", "KeyError", {})
    for text, kind, values in others:
        assert (text, kind) == ("prepared", "PeerFailed")
        assert "KeyError: 'no such file'" in values.values()


def cycles(world: lockstep.World, count: int) -> int:
    size = world.size
    world.close()
    for number in range(count):
        with lockstep.init() as inner:
            assert inner.mean(float(inner.rank), 1.0) == (size - 1) / 2, number
    return count


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.rest)])
def test_start_stop_cycles_of_eight_ranks_without_an_abort(count: int) -> None:
    assert run_ranks(cycles, 8, args=(count,)) == [count] * 8


def collect() -> None:
    gc.set_threshold(1, 1, 1)
    assert len([[number] for number in range(100)]) == 100


def forks() -> tuple[int, bool]:
    """How the child ends: with 7, if its collector is on."""
    # a hook of another module collects before those of a world are called
    os.register_at_fork(after_in_child=collect)
    gc.set_threshold(10**9)
    with lockstep.init(backend="gloo"):
        garbage: list[Any] = [dist.group.WORLD]
        garbage.append(garbage)
        dist.barrier()
    del garbage
    child = os.fork()
    if child == 0:
        collect()
        os._exit(7 if gc.isenabled() else 8)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gc.isenabled()


def test_a_forked_child_does_not_tear_down_a_group_that_was_left_for_collection() -> None:
    assert lockstep.launch(forks, 1) == [(7, True)]


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


def test_a_process_group_that_the_program_destroyed() -> None:
    """Not missed at the end of the world, as torch's examples end; named where something comes
    after it.
    """
    for used_after in (False, True):
        with lockstep.init(backend="gloo") as world:
            destroys_inside(world, used_after)
        run_ranks(destroys_inside, 2, args=(used_after,))


def test_a_world_left_open_whose_group_the_program_destroyed() -> None:
    code = "lockstep.init(); dist.destroy_process_group()"
    code = f"import lockstep, torch.distributed as dist; {code}; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
