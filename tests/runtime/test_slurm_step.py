"""What SLURM's variables mean in a task, in a batch script's shell and in a shell of salloc:
environments as SLURM 22.05 sets them.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.runtime import slurm_step
from lockstep.runtime.environment import Placement, exported, placement, step_of
from lockstep.runtime.slurm_step import first_host, port, step
from tests.refused import refused
from tests.runtime.variables import variables

JOB = variables("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-4] SLURM_NNODES=1 SLURM_JOB_NUM_NODES=1")
BATCH = {
    **JOB,
    **variables("ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0"),
}
TASK = {
    **BATCH,
    **variables("SLURM_STEP_ID=1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=n2"),
}


def task(rank: int, size: int, more: str = "") -> dict[str, str]:
    numbers = f"SLURM_PROCID={rank} SLURM_NTASKS={size} SLURM_STEP_NUM_TASKS={size}"
    return {**TASK, **variables(f"{numbers} {more}")}


def test_a_task_of_srun() -> None:
    numbers = "SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NTASKS_PER_NODE=2"
    place = step(task(1, 2, numbers))
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 2, 1, 2)
    assert (place.node, place.job, place.number, place.name) == (0, "7", 1, "7.1")
    assert place.nodelist == "n2"
    alone = step(variables("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1"))
    assert alone is not None, "the numbers alone are enough"
    assert (alone.rank, alone.size, alone.local_rank, alone.local_size) == (1, 2, 1, 2)
    assert alone.node == 0


def test_tasks_of_each_host_are_counted_out() -> None:
    for node, local_size in ((0, 3), (2, 3), (3, 1)):
        hosts = f"SLURM_NODEID={node} SLURM_STEP_TASKS_PER_NODE=3(x3),1 SLURM_STEP_NUM_NODES=4"
        place = step(task(9, 10, f"{hosts} SLURM_NTASKS_PER_NODE=3"))
        assert place is not None
        assert place.local_size == local_size


def test_a_plain_process() -> None:
    assert step({}) is None, "no SLURM"
    assert step({**JOB, "SLURM_NTASKS": "4"}) is None, "a shell of salloc"
    shell = task(0, 1, f"SLURM_STEP_ID={2**32 - 6} SLURM_NTASKS=4")
    assert step(shell) is None, "a shell of salloc that is a step"
    assert step(BATCH) is None, "a batch script that did not ask"
    assert step({**BATCH, "SLURM_NTASKS": "1"}) is None, "a batch script of one task"
    one = variables("SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=1")
    assert step({**BATCH, **one}) is None, "a batch script of one task a host"


def test_contradictions() -> None:
    fewer, lists = "fewer-tasks-than-asked", "slurm-list-unreadable"
    with refused(fewer, size_name="SLURM_NTASKS", size=1, per_node=2, expected=2, fullest=1):
        step(task(0, 1, "SLURM_NTASKS_PER_NODE=2 SLURM_STEP_TASKS_PER_NODE=1"))
    with refused(fewer, size=1, per_node=2, expected=2):
        step({**BATCH, **variables("SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=2")})
    with refused(fewer, size=2, per_node=4, expected=4):
        step(task(1, 2, "SLURM_NTASKS_PER_NODE=4"))
    with refused("batch-script-shell", expected=2):
        step({**BATCH, **variables("SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2")})
    with refused("batch-script-shell", expected=6):
        step({**BATCH, **variables("SLURM_NTASKS_PER_NODE=2 SLURM_NNODES=3")})
    with refused("incomplete-settings", given="SLURM_PROCID=1", lacking="SLURM_NTASKS"):
        step({"SLURM_PROCID": "1"})
    with refused("wrong-value", name="SLURM_PROCID", value="first"):
        step(task(0, 2, "SLURM_PROCID=first"))
    with refused(lists, name="SLURM_STEP_TASKS_PER_NODE", value="two"):
        step(task(0, 2, "SLURM_STEP_TASKS_PER_NODE=two"))


@given(st.integers(1, 2**31), st.integers(0, 1000))
def test_a_port_is_neither_privileged_nor_ephemeral(job: int, number: int) -> None:
    assert 10_000 <= port(str(job), number) < 32_768


@given(st.integers(1, 2**31))
def test_steps_of_a_job_and_the_next_jobs_do_not_share_a_port(job: int) -> None:
    ports = [port(str(job + more), number) for more in range(20) for number in range(50)]
    assert len(set(ports)) == len(ports)


ONE_HOST = variables(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1"
    " SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=n[03-04]"
)
TWO_HOSTS = {
    **ONE_HOST,
    **variables("SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=1(x2)"),
}
PORT = str(slurm_step.port("7", 2))


@pytest.mark.parametrize(
    ("env", "host", "local"),
    [
        (ONE_HOST, "127.0.0.1", "LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0"),
        (TWO_HOSTS, "n03", "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1"),
    ],
)
def test_what_scripts_for_torchrun_read(env: dict[str, str], host: str, local: str) -> None:
    place = placement(env)
    assert place is not None
    exports = exported(place, env)
    ranks = f"RANK=1 WORLD_SIZE=2 MASTER_ADDR={host} MASTER_PORT={PORT}"
    assert exports == variables(f"{ranks} {local}")
    both = {**env, **exports}
    # lockstep.init() meets as it would without them
    assert step_of(placement(both), both) == slurm_step.step(env)


def test_what_the_user_set_stays() -> None:
    env = {**TWO_HOSTS, "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert step_of(placement(env), env) is None
    assert exported(placement(env), env).keys() & {"MASTER_ADDR", "MASTER_PORT"} == set()


def test_ranks_of_another_launcher_inside_of_a_step_are_not_its_tasks() -> None:
    inner = {**ONE_HOST, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert step_of(placement(inner), inner) is None
    given = Placement(rank=1, size=2, local_rank=1, local_size=2, node=0, source="arguments")
    assert step_of(given, ONE_HOST) is None


def test_a_step_without_hosts() -> None:
    env = {name: value for name, value in TWO_HOSTS.items() if name != "SLURM_STEP_NODELIST"}
    with refused("rank-0-host-unknown", source="SLURM_STEP_NODELIST and SLURM_JOB_NODELIST"):
        exported(placement(env), env)


def test_first_host_of_a_nodelist() -> None:
    hosts = {
        "n[08-11,07].cluster.local,x": "n08.cluster.local",
        ",a,,b,": "a",
        "a[009-12,1]b[3]c,d": "a009b3c",
        "[1-2]": "1",
        "a[0-9999]b[0-9999]c[0-9999]": "a0b0c0",
    }
    assert {nodelist: first_host(nodelist) for nodelist in hosts} == hosts
    for nodelist in ("", ",", "n[1-3", "n[1,,2]", "n[a-b]", "n1 n2"):
        with refused("slurm-list-unreadable", value=nodelist):
            first_host(nodelist)


@given(st.text("n1-,[] a", max_size=8))
def test_anything_names_a_host_or_is_refused_in_a_sentence(nodelist: str) -> None:
    message = ""
    try:
        host = first_host(nodelist)
    except UsageError as error:
        host, message = "", str(error)
    assert bool(host) != (repr(nodelist) in message)
    assert not set(host) & set("[], ")
