"""Ranks of a job step on several hosts: they meet on a port that nobody told them, and tell a
stranger's.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from lockstep.errors import LockstepError
from lockstep.runtime.slurm import Step
from lockstep.world import slurm_store
from lockstep.world.slurm_store import across_hosts
from tests.refused import refused

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
        stores = [
            each.result()
            for each in [pool.submit(across_hosts, task(rank), SOON) for rank in (1, 0)]
        ]
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
    monkeypatch.setattr(slurm_store, "_KNOWN_WITHIN", timedelta(seconds=0.2))
    step = task(1)
    stranger = dist.TCPStore(
        "127.0.0.1", step.port, is_master=True, wait_for_workers=False, timeout=SOON
    )
    of_another_step = replace(step, number=1)
    stranger.set(slurm_store._mark(of_another_step), of_another_step.name)
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
