"""A rank's place, as launchers spell it, and the contradictions that must not reach a
rendezvous.
"""

from __future__ import annotations

import pytest

from lockstep.runtime.environment import Placement, placement, rank_and_size, started_by_others
from lockstep.world.world import World
from tests.refused import refused
from tests.runtime.variables import SRUN, variables
from tests.teams import on_team

OMPI = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=6 OMPI_COMM_WORLD_LOCAL_RANK=0"
TORCHRUN = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1"
LAUNCHERS = {
    "torchrun": (TORCHRUN, (5, 8, 1, 4, 1)),
    "torchrun in a PyTorchJob": (f"{TORCHRUN} PET_NNODES=2", (5, 8, 1, 4, 1)),
    "PyTorchJob without local numbers is one host": ("RANK=3 WORLD_SIZE=4", (3, 4, 3, 4, 0)),
    "local rank 0 of rank 3: a host each": ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=0", (3, 4, 0, 1, 3)),
    "PyTorchJob: a rank a pod": (
        "RANK=3 WORLD_SIZE=4 PET_NNODES=4 PET_NODE_RANK=3",
        (3, 4, 0, 1, 3),
    ),
    "Open MPI": (f"{OMPI} OMPI_COMM_WORLD_LOCAL_SIZE=2", (2, 6, 0, 2, 1)),
    "MPICH": ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", (1, 2, 1, 2, 0)),
    "RANK comes first": ("RANK=0 WORLD_SIZE=1 PMI_RANK=1 PMI_SIZE=2", (0, 1, 0, 1, 0)),
}
IN_A_STEP = {
    "srun": ("", (5, 6, 2, 3, 1)),
    "srun --mpi=pmi2": ("PMI_RANK=5 PMI_SIZE=6", (5, 6, 2, 3, 1)),
    "mpiexec inside of a job": ("PMI_RANK=1 PMI_SIZE=2", (1, 2, 1, 2, 0)),
    "RANK before SLURM": ("RANK=1 WORLD_SIZE=2", (1, 2, 1, 2, 0)),
}


def test_launchers() -> None:
    assert placement({}) is None
    assert placement({"RANK": "", "WORLD_SIZE": " "}) is None
    for step, cases in (({}, LAUNCHERS), (SRUN, IN_A_STEP)):
        for case, (text, expected) in cases.items():
            place = placement({**step, **variables(text)})
            assert isinstance(place, Placement), case
            numbers = (place.rank, place.size, place.local_rank, place.local_size, place.node)
            assert numbers == expected, case


def test_contradictions_name_variables_and_values() -> None:
    incomplete, outside = "incomplete-settings", "rank-out-of-range"
    with refused(incomplete, given="RANK=1", lacking="WORLD_SIZE"):
        placement(variables("RANK=1"))
    with refused(incomplete, given="WORLD_SIZE=2", lacking="RANK"):
        placement(variables("WORLD_SIZE=2"))
    with refused(outside, name="RANK", value=2, size_name="WORLD_SIZE", size=2, last=1):
        placement(variables("RANK=2 WORLD_SIZE=2"))
    with refused(outside, name="RANK", value=-1):
        placement(variables("RANK=-1 WORLD_SIZE=2"))
    with refused("wrong-value", name="WORLD_SIZE", value=0):
        placement(variables("RANK=0 WORLD_SIZE=0"))
    with refused("wrong-value", name="RANK", value="one"):
        placement(variables("RANK=one WORLD_SIZE=2"))
    with refused(outside, name="OMPI_COMM_WORLD_RANK", value=4):
        placement(variables("OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=4"))
    with refused(outside, name="LOCAL_RANK", value=2):
        placement(variables("RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2"))
    local = {"name": "LOCAL_WORLD_SIZE", "value": 4}
    with refused("local-size-out-of-range", **local, size_name="WORLD_SIZE", size=2):
        placement(variables("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4"))
    with refused("pod-without-torchrun", nodes="2", each="4", size=8):
        placement(variables("RANK=0 WORLD_SIZE=8 PET_NNODES=2 PET_NPROC_PER_NODE=4"))
    with refused(outside, name="SLURM_PROCID", value=6, size_name="SLURM_NTASKS", size=6):
        placement({**SRUN, "SLURM_PROCID": "6"})
    with refused(outside, name="SLURM_LOCALID", value=3, size_name="tasks on this node", size=3):
        placement({**SRUN, "SLURM_LOCALID": "3"})


def test_who_was_started_by_another_launcher_is_a_rank() -> None:
    assert started_by_others(SRUN) == placement(SRUN)
    assert started_by_others({**SRUN, "LOCKSTEP_PARENT": "1"}) is None
    assert started_by_others({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert started_by_others({}) is None


def numbers(world: World) -> tuple[int, int]:
    return rank_and_size()


def test_rank_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an open group, of a plain process, and of a rank that has no group yet."""
    assert on_team(numbers, 2) == [(0, 2), (1, 2)]
    assert rank_and_size() == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with refused("no-world-open", why=" but RANK=1 and WORLD_SIZE=4 are set"):
        rank_and_size()
