"""What SLURM's variables mean in a task, in a batch script's shell and in a shell of salloc:
environments as SLURM 22.05 sets them.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.runtime.slurm import port, step
from tests.refused import refused

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NNODES": "1",
    "SLURM_JOB_NUM_NODES": "1",
}
BATCH = {
    **JOB,
    "ENVIRONMENT": "BATCH",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
TASK = {**BATCH, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n2"}


def task(rank: int, size: int, **more: str) -> dict[str, str]:
    numbers = {"SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_STEP_NUM_TASKS": size}
    return {**TASK, **{name: str(number) for name, number in numbers.items()}, **more}


def test_a_task_of_srun() -> None:
    found = step(
        task(1, 2, SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="2", SLURM_NTASKS_PER_NODE="2")
    )
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size, found.node) == (
        1,
        2,
        1,
        2,
        0,
    )
    assert (found.job, found.number, found.name, found.nodelist) == ("7", 1, "7.1", "n2")


@pytest.mark.parametrize(("node", "local_size"), [(0, 3), (2, 3), (3, 1)])
def test_tasks_of_each_host_are_counted_out(node: int, local_size: int) -> None:
    env = task(
        9,
        10,
        SLURM_NODEID=str(node),
        SLURM_STEP_TASKS_PER_NODE="3(x3),1",
        SLURM_STEP_NUM_NODES="4",
        SLURM_NTASKS_PER_NODE="3",
    )
    found = step(env)
    assert found is not None
    assert found.local_size == local_size


def test_the_numbers_alone_are_enough() -> None:
    found = step({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"})
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size, found.node) == (
        1,
        2,
        1,
        2,
        0,
    )


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="no SLURM"),
        pytest.param({**JOB, "SLURM_NTASKS": "4"}, id="a shell of salloc"),
        pytest.param(
            task(0, 1, SLURM_STEP_ID=str(2**32 - 6), SLURM_NTASKS="4"),
            id="a shell of salloc that is a step",
        ),
        pytest.param({**BATCH, "SLURM_NTASKS": "1"}, id="a batch script of one task"),
        pytest.param(BATCH, id="a batch script that did not ask"),
        pytest.param(
            {**BATCH, "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"},
            id="a batch script of one task a host",
        ),
    ],
)
def test_a_plain_process(env: dict[str, str]) -> None:
    assert step(env) is None


@pytest.mark.parametrize(
    ("env", "code", "values"),
    [
        (
            task(0, 1, SLURM_NTASKS_PER_NODE="2", SLURM_STEP_TASKS_PER_NODE="1"),
            "fewer-tasks-than-asked",
            {"size_name": "SLURM_NTASKS", "size": 1, "per_node": 2, "expected": 2, "fullest": 1},
        ),
        (
            {**BATCH, "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"},
            "fewer-tasks-than-asked",
            {"size": 1, "per_node": 2, "expected": 2},
        ),
        (
            task(1, 2, SLURM_NTASKS_PER_NODE="4"),
            "fewer-tasks-than-asked",
            {"size": 2, "per_node": 4, "expected": 4},
        ),
        (
            {**BATCH, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"},
            "batch-script-shell",
            {"expected": 2},
        ),
        (
            {**BATCH, "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "3"},
            "batch-script-shell",
            {"expected": 6},
        ),
        (
            {"SLURM_PROCID": "1"},
            "incomplete-settings",
            {"given": "SLURM_PROCID=1", "lacking": "SLURM_NTASKS"},
        ),
        (
            task(0, 2, SLURM_PROCID="first"),
            "not-a-whole-number",
            {"name": "SLURM_PROCID", "value": "first"},
        ),
        (
            task(0, 2, SLURM_STEP_TASKS_PER_NODE="two"),
            "slurm-list-unreadable",
            {"name": "SLURM_STEP_TASKS_PER_NODE", "value": "two"},
        ),
    ],
)
def test_contradictions(env: dict[str, str], code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        step(env)


@given(st.integers(1, 2**31), st.integers(0, 1000))
def test_a_port_is_neither_privileged_nor_ephemeral(job: int, number: int) -> None:
    assert 10_000 <= port(str(job), number) < 32_768


@given(st.integers(1, 2**31))
def test_steps_of_a_job_and_the_next_jobs_do_not_share_a_port(job: int) -> None:
    ports = [port(str(job + more), number) for more in range(20) for number in range(50)]
    assert len(set(ports)) == len(ports)
