"""Solution 2: find your place, join a process group, leave it, and choose the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)

R = TypeVar("R")


def place(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Return the rank, the world size and the local rank of this process.

    1. `torchrun` sets RANK, WORLD_SIZE and LOCAL_RANK.
    2. `srun` sets SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. They count only if none of the
       variables of `torchrun` is set.
    3. Without a launcher the world has one rank.

    Nobody may train alone by mistake: if only some of the three variables of a launcher are set,
    raise a ValueError that names the missing ones.

    Args:
        environ: environment variables, as in `os.environ`.
    """
    for names in LAUNCHERS:
        missing = [name for name in names if name not in environ]
        if not missing:
            rank, world_size, local_rank = (int(environ[name]) for name in names)
            return rank, world_size, local_rank
        if len(missing) < len(names):
            raise ValueError(f"a launcher has set some of {names}, but not {missing}")
    return 0, 1, 0


def run(rank: int, world_size: int, init_method: str, work: Callable[[], R]) -> R:
    """Join the default process group with the gloo backend, and return what `work()` returns.

    Leave the group in every case, also if `work` raises.

    Args:
        rank: the number of this process.
        world_size: how many processes there are.
        init_method: where the ranks meet, such as "tcp://localhost:29500".
        work: calls collectives.
    """
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    try:
        return work()
    finally:
        dist.destroy_process_group()


def setup(defaults: Mapping[str, str], timeout: timedelta) -> torch.device:
    """Join the default process group, and return the device of this rank.

    1. Set the variables of `defaults` that are missing in `os.environ`. Those of a launcher stay.
    2. If there is a GPU, make `cuda:LOCAL_RANK` the current device. Otherwise use the CPU.
    3. Open the group with this timeout. The backend is nccl on GPUs, else gloo.

    Args:
        defaults: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of a rank that was
            started by hand.
        timeout: the longest time that a collective may take.
    """
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend, timeout=timeout)
    return device
