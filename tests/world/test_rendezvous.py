"""Ranks without an address: those of a SLURM step on several hosts meet on a port that nobody told
them; those of one parent find rank 0 by a file that only they can read.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import collectives
from lockstep.errors import LockstepError
from lockstep.runtime import private
from lockstep.runtime.slurm_step import Step
from lockstep.world import rendezvous
from lockstep.world.rendezvous import across_hosts
from tests.refused import refused
from tests.world.siblings import run_siblings

SOON = timedelta(seconds=20)


def task(rank: int, nodelist: str = "localhost,elsewhere") -> Step:
    return Step(
        rank=rank,
        size=2,
        local_rank=0,
        local_size=1,
        node=rank,
        job=str(os.getpid()),
        number=0,
        nodelist=nodelist,
    )


def test_they_meet_and_keep_apart_from_other_steps() -> None:
    with ThreadPoolExecutor(2) as pool:
        second, first = (pool.submit(across_hosts, task(rank), SOON) for rank in (1, 0))
        stores = [second.result(), first.result()]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert across_hosts(task(0), SOON) is stores[1]  # of a second world
    raw = dist.TCPStore("127.0.0.1", task(0).port, is_master=False, timeout=SOON)
    assert not raw.check(["key"])
    across_hosts.cache_clear()


def test_rank_0_finds_its_port_taken() -> None:
    step = task(0, "127.0.0.1,elsewhere")
    with (
        socket.create_server(("127.0.0.1", step.port)),
        refused(
            "slurm-port-taken", port=step.port, host="127.0.0.1", step=step.name, why="is in use"
        ),
    ):
        across_hosts(step, SOON)


def test_a_strangers_store_on_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_KNOWN_WITHIN", timedelta(seconds=0.2))
    step = task(1)
    stranger = dist.TCPStore(
        "127.0.0.1", step.port, is_master=True, wait_for_workers=False, timeout=SOON
    )
    of_another_step = replace(step, number=1)
    stranger.set(rendezvous._mark(of_another_step), of_another_step.name)
    with refused(
        "slurm-port-taken",
        LockstepError,
        port=step.port,
        host="localhost",
        step=step.name,
        why="belongs to another program",
    ):
        across_hosts(step, SOON)


def test_a_host_that_cannot_be_looked_up() -> None:
    for rank in (0, 1):
        with refused("host-not-found", host="nowhere.invalid"):
            across_hosts(task(rank, "nowhere.invalid"), SOON)


AT_ONCE = timedelta(seconds=0.05)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return private.user_directory()


def _dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def _published(home: Path, pid: int, name: str = "aaa", key: str = "job") -> Path:
    """What the process would have published; the store's file is beside it."""
    file = home / f"store-{pid}-{private.start_time(pid)}-{name}"
    file.touch()
    published = Path(f"{file}-{key}")
    published.touch()
    return published


def test_published_found_withdrawn() -> None:
    first = rendezvous.publish_store_file("job")
    assert rendezvous.find_store_file("job", AT_ONCE) == first
    second = rendezvous.publish_store_file("job")
    assert second != first
    assert rendezvous.find_store_file("job", AT_ONCE) == second
    rendezvous.withdraw_store_file("job")
    assert second.exists()
    with refused("rank-0-not-found", LockstepError, seconds=0.05):
        rendezvous.find_store_file("job", AT_ONCE)


def test_whoever_looks_first_waits() -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(rendezvous.find_store_file, "job", timedelta(seconds=20))
        assert rendezvous.publish_store_file("job") == found.result()


def test_stale_files_are_ignored_and_removed(home: Path) -> None:
    """Of a process that is dead, of one whose pid another has by now, and garbage."""
    dead, reused = f"store-{_dead_process()}-5-aaa", f"store-{os.getppid()}-1-aaa"
    for stale in (dead, reused, "store-x-y-z"):
        (home / stale).touch()
        (home / f"{stale}-job").touch()
    with refused("rank-0-not-found", LockstepError):
        rendezvous.find_store_file("job", AT_ONCE)
    file = rendezvous.publish_store_file("job")
    assert rendezvous.find_store_file("job", AT_ONCE) == file
    assert {*home.iterdir()} == {file, Path(f"{file}-job")}


def test_publishing_keeps_what_the_living_have_left(home: Path) -> None:
    living = _published(home, os.getppid(), key="other")
    rendezvous.publish_store_file("job")
    assert rendezvous.find_store_file("other", AT_ONCE) == Path(str(living).removesuffix("-other"))


def test_only_the_owner_withdraws(home: Path) -> None:
    published = _published(home, os.getppid())
    rendezvous.withdraw_store_file("job")
    assert published.exists()


def test_the_store_is_private(home: Path) -> None:
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE(rendezvous.publish_store_file("job").stat().st_mode) == 0o600
    home.chmod(0o755)
    with refused("directory-not-private", LockstepError, path=str(home)):
        rendezvous.publish_store_file("job")


def two_worlds(rank: int) -> list[tuple[float, int]]:
    """A second world of the same processes has a store of its own."""
    sums = []
    for number in (1, 2):
        with lockstep.init(rank=rank, world_size=3, backend="gloo") as world:
            total = collectives.all_reduce(torch.tensor([10.0 * number + rank])).item()
            sums.append((total, world.local_size))
    return sums


def test_siblings_join_twice_and_leave_nothing(home: Path) -> None:
    assert run_siblings(two_worlds, 3)[0] == [[(33.0, 3), (63.0, 3)]] * 3
    assert [*home.iterdir()] == []


def test_the_key_is_the_parents_unless_a_launcher_names_the_job() -> None:
    parent = os.getppid()
    assert rendezvous.siblings_key({}) == f"{parent}-{private.start_time(parent)}"
    one, same, other = (
        rendezvous.siblings_key({"PMIX_NAMESPACE": name}) for name in ("a", "a", "../b")
    )
    assert one == same != other
    assert "/" not in other
