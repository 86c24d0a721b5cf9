"""Where the tasks of a job step meet, worked out by each of them alone."""

from __future__ import annotations

import pytest

from lockstep import slurm
from lockstep.errors import UsageError
from lockstep.launcher.job_step import exported, step_of
from lockstep.place import Placement, placement

ONE_HOST = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "n[03-04]",
}
TWO_HOSTS = {**ONE_HOST, "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
PORT = str(slurm.port("7", 2))


def place_in(env: dict[str, str]) -> Placement:
    place = placement(env)
    assert place is not None
    return place


@pytest.mark.parametrize(
    ("env", "host", "local"),
    [(ONE_HOST, "127.0.0.1", ("1", "2", "0")), (TWO_HOSTS, "n03", ("0", "1", "1"))],
)
def test_what_scripts_for_torchrun_read(env: dict[str, str], host: str, local: tuple[str, str, str]) -> None:
    variables = exported(place_in(env), env)
    assert variables == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": local[0],
        "LOCAL_WORLD_SIZE": local[1],
        "GROUP_RANK": local[2],
        "MASTER_ADDR": host,
        "MASTER_PORT": PORT,
    }
    both = {**env, **variables}
    assert step_of(place_in(both), both) == slurm.step(env)  # lockstep.init() meets as it would without them


def test_what_the_user_set_stays() -> None:
    env = {**TWO_HOSTS, "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert step_of(place_in(env), env) is None
    assert exported(place_in(env), env).keys() & {"MASTER_ADDR", "MASTER_PORT"} == set()


def test_ranks_of_another_launcher_inside_of_a_step_are_not_its_tasks() -> None:
    inner = {**ONE_HOST, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert step_of(place_in(inner), inner) is None
    given = Placement(rank=1, size=2, local_rank=1, local_size=2, node=0, source="arguments")
    assert step_of(given, ONE_HOST) is None


def test_a_step_without_hosts() -> None:
    env = {name: value for name, value in TWO_HOSTS.items() if name != "SLURM_STEP_NODELIST"}
    with pytest.raises(
        UsageError, match="SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set, so rank 0's host is not known: set MASTER"
    ):
        exported(place_in(env), env)
