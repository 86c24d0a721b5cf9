"""Where this process stands among the ranks, read from what a launcher left in the environment.

Four launchers leave four spellings of the same numbers; this is the only file that knows them. Pure: an environment goes in,
a `Placement` or nothing comes out, and a contradiction is refused here, before anyone waits for a rank that cannot exist.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import UsageError


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
    """The variables that were read, for messages: "RANK and WORLD_SIZE"."""


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How one launcher names the numbers. Only the first two must be set."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str | None = None

    def read(self, env: Mapping[str, str]) -> Placement | None:
        rank, size = _number(env, self.rank), _number(env, self.size)
        if rank is None and size is None:
            return None
        if rank is None or size is None:
            have, lack = (self.size, self.rank) if rank is None else (self.rank, self.size)
            raise UsageError(f"{have}={env[have]} is set but {lack} is not: set both, or neither for a single process")
        _check_below(self.rank, rank, self.size, size)
        local_rank, local_size = self._local(env, rank, size)
        node = _number(env, self.node) if self.node else None
        source = f"{self.rank} and {self.size}"
        return Placement(rank, size, local_rank, local_size, rank // local_size if node is None else node, source)

    def _local(self, env: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
        """One host is assumed where the launcher names no local numbers."""
        local_rank, local_size = _number(env, self.local_rank), _number(env, self.local_size)
        if local_size is None:
            local_size = size if local_rank is None else max(size if local_rank == rank else 1, local_rank + 1)
        elif not 1 <= local_size <= size:
            raise UsageError(
                f"{self.local_size}={local_size} does not lie in 1..{self.size}={size}: a host cannot run more ranks than the job"
            )
        if local_rank is None:
            local_rank = rank % local_size
        _check_below(self.local_rank, local_rank, self.local_size, local_size)
        return local_rank, local_size


_SPELLINGS = (
    _Spelling("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    _Spelling("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _Spelling("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def placement(env: Mapping[str, str]) -> Placement | None:
    """Read this rank's place from a launcher's variables; None where no launcher left any.

    Known are RANK/WORLD_SIZE (`lockstep run`, torchrun, PyTorchJob), OMPI_COMM_WORLD_* (Open MPI) and PMI_* (MPICH, Intel MPI);
    the first pair that is set counts. Where a launcher names no local numbers one host is assumed. Reads nothing but `env`.

    Raises:
        UsageError: one of a pair is missing, a value is not an integer, or a rank is not below its size.
    """
    for spelling in _SPELLINGS:
        place = spelling.read(env)
        if place is not None:
            return place
    return None


def rank_and_size() -> tuple[int, int]:
    """This process's (rank, world size): of torch's default process group if one is open, else (0, 1).

    Raises:
        UsageError: the environment says that this is one of several ranks, but no process group is open yet.
    """
    if "torch" in sys.modules:
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
    place = placement(os.environ)
    if place is None or place.size == 1:
        return 0, 1
    names = place.source.split(" and ")
    raise UsageError(
        f"{names[0]}={place.rank} and {names[1]}={place.size} are set but no process group is open; call lockstep.init() first"
    )


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not an integer") from None


def _check_below(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise UsageError(f"{size_name}={size} is below 1: there is at least one rank")
    if not 0 <= rank < size:
        raise UsageError(f"{rank_name}={rank} does not lie in 0..{size - 1}, but {size_name}={size}: ranks count from 0")
