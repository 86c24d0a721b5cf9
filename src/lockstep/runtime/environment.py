"""This process's place among the ranks, read from the environment variables of its launcher.

Launchers use different names for the same numbers, and only this file knows them (slurm_step.py
knows what SLURM means by its variables). The functions are pure: they read an environment, and
return a `Placement` or None. They refuse a contradiction before anyone waits for a rank that cannot
exist.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from lockstep.config.knob import whole
from lockstep.errors import UsageError
from lockstep.runtime import slurm_step
from lockstep.runtime.process_lifetime import PARENT
from lockstep.runtime.slurm_step import number_of

TIMEOUT = "LOCKSTEP_TIMEOUT"
"""Environment variable: seconds that a collective may take, unless `init` is given a timeout."""
COLLECTIVES_FILE = "LOCKSTEP_DEBUG_FILE"
"""Environment variable: the file to which this rank adds a line for every collective
(collectives/group.py, Record).
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank's place in a job."""

    rank: int
    """This process's number in the whole job, 0 <= rank < size."""
    size: int
    """The world size: ranks over all hosts."""
    local_rank: int
    """This process's number on its host, 0 <= local_rank < local_size."""
    local_size: int
    """Ranks on this host."""
    node: int
    """This host's number in the job."""
    source: str
    """The names of the variables that were read, for messages: "RANK and WORLD_SIZE"."""


@dataclass(frozen=True, slots=True)
class _Spelling:
    """The names that one launcher gives to the numbers. Only `rank` and `size` must be set."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str | None = None

    def read(self, env: Mapping[str, str]) -> Placement | None:
        rank = number_of(env, self.rank)
        size = number_of(env, self.size)
        if rank is None and size is None:
            return None
        if rank is None or size is None:
            names = [self.rank, self.size]
            if rank is None:
                names.reverse()
            present, lacking = names
            written = f"{present}={env[present]}"
            raise UsageError("incomplete-settings", given=written, lacking=lacking)
        check_rank(self.rank, rank, self.size, size)
        local_rank, local_size = self._local(env, rank, size)
        node = number_of(env, self.node) if self.node else None
        if node is None:
            node = rank // local_size
        return Placement(rank, size, local_rank, local_size, node, f"{self.rank} and {self.size}")

    def _local(self, env: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
        """Return (local rank, local size). Assume one host if the launcher sets no local numbers,
        and one rank per pod in a PyTorchJob.
        """
        local_rank = number_of(env, self.local_rank)
        local_size = number_of(env, self.local_size)
        if local_rank is None and local_size is None and env.get("PET_NNODES"):
            _check_pod(env, size)
            local_rank, local_size = 0, 1
        if local_size is None:
            local_size = size
            if local_rank not in (None, rank):  # several hosts
                local_size = max(1, local_rank + 1)
        elif not 1 <= local_size <= size:
            raise UsageError(
                "local-size-out-of-range",
                name=self.local_size,
                value=local_size,
                size_name=self.size,
                size=size,
            )
        if local_rank is None:
            local_rank = rank % local_size
        check_rank(self.local_rank, local_rank, self.local_size, local_size)
        return local_rank, local_size


_FIRST = _Spelling("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_OPEN_MPI = _Spelling(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = _Spelling("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def placement(env: Mapping[str, str]) -> Placement | None:
    """Read this rank's place from a launcher's variables; None if there are none.

    It knows RANK/WORLD_SIZE (`lockstep run`, torchrun, PyTorchJob), OMPI_COMM_WORLD_* (Open MPI),
    PMI_* (MPICH, Intel MPI) and SLURM_PROCID/SLURM_NTASKS (srun), and uses the first pair that is
    set. If a launcher sets no local numbers, one host is assumed. Reads nothing but `env`.

    Raises:
        UsageError: one of a pair is missing, a value is not an integer, a rank is not below its
        size, or SLURM's numbers contradict each other.
    """
    first = _FIRST.read(env)
    if first is not None:
        return first
    mpi = _OPEN_MPI.read(env) or _MPICH.read(env)
    if mpi is None:
        return _of_slurm(env)
    # srun --mpi=pmi2 sets PMI_* too, without local numbers. An mpirun inside a job sets its own
    # numbers; SLURM's then describe mpirun's daemons.
    with suppress(UsageError):
        slurm = _of_slurm(env)
        if slurm is not None and (slurm.rank, slurm.size) == (mpi.rank, mpi.size):
            return slurm
    return mpi


def started_by_others(env: Mapping[str, str]) -> Placement | None:
    """Return the place of a process that torchrun, srun, mpirun or a cluster started as one of
    several ranks; None for any other process.

    Such a process is a rank, and not a command that starts ranks.
    """
    if PARENT in env:
        return None
    started = placement(env)
    return started if started is not None and started.size > 1 else None


def rank_and_size() -> tuple[int, int]:
    """Return (rank, world size) of torch's default process group if one is open, else (0, 1).

    Raises:
        UsageError: the environment says that this is one of several ranks, but no process group is
        open yet.
    """
    if "torch" in sys.modules:
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
    started = placement(os.environ)
    if started is None or started.size == 1:
        return 0, 1
    rank_name, size_name = started.source.split(" and ")
    text = f" but {rank_name}={started.rank} and {size_name}={started.size} are set"
    raise UsageError("no-world-open", why=text)


def _of_slurm(env: Mapping[str, str]) -> Placement | None:
    step = slurm_step.step(env)
    if step is None:
        return None
    check_rank(slurm_step.RANK, step.rank, slurm_step.SIZE, step.size)
    check_rank(slurm_step.LOCAL_RANK, step.local_rank, "tasks on this node", step.local_size)
    return Placement(
        step.rank,
        step.size,
        step.local_rank,
        step.local_size,
        step.node,
        f"{slurm_step.RANK} and {slurm_step.SIZE}",
    )


def _check_pod(env: Mapping[str, str], size: int) -> None:
    """Raise UsageError in a PyTorchJob's pod of several ranks. PET_* are for torchrun, which would
    have set local numbers.
    """
    per_node = env.get("PET_NPROC_PER_NODE", "1").strip() or "1"
    nodes = env["PET_NNODES"]
    if per_node != "1" or nodes.strip() != str(size):
        raise UsageError("pod-without-torchrun", nodes=nodes, each=per_node, size=size)


def check_rank(rank_name: str, rank: int, size_name: str, size: int) -> None:
    """Raise UsageError unless 0 <= rank < size."""
    whole(size_name, size)
    if not 0 <= rank < size:
        raise UsageError(
            "rank-out-of-range",
            name=rank_name,
            value=rank,
            size_name=size_name,
            size=size,
            last=size - 1,
        )


def step_of(this_rank: Placement, env: Mapping[str, str]) -> slurm_step.Step | None:
    """Return the SLURM job step that this rank is a task of. None if there is none, or if
    MASTER_ADDR or MASTER_PORT name another rendezvous.
    """
    if this_rank.source == "arguments":
        return None
    try:
        step = slurm_step.step(env)
    except UsageError:  # ranks of another launcher, started in a job's shell
        return None
    if step is None or (step.rank, step.size) != (this_rank.rank, this_rank.size):
        return None
    rendezvous = (env.get("MASTER_ADDR"), env.get("MASTER_PORT"))
    return step if rendezvous in ((None, None), slurm_step.endpoint(step)) else None


def timeout_for_ranks(seconds: float | None) -> dict[str, str]:
    """Return the variables that set the timeout of `lockstep.init()`'s collectives to `seconds`."""
    return {} if seconds is None else {TIMEOUT: str(seconds)}


def exported(this_rank: Placement, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that scripts for torchrun read and `env` lacks. For a rank that another
    launcher started.
    """
    values = {
        "RANK": str(this_rank.rank),
        "WORLD_SIZE": str(this_rank.size),
        "LOCAL_RANK": str(this_rank.local_rank),
        "LOCAL_WORLD_SIZE": str(this_rank.local_size),
        "GROUP_RANK": str(this_rank.node),
    }
    step = step_of(this_rank, env)
    if step is not None:
        values["MASTER_ADDR"], values["MASTER_PORT"] = slurm_step.endpoint(step)
    return {name: value for name, value in values.items() if name not in env}
