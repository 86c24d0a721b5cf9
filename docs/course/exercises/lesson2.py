"""Exercise 2: find your place, join a process group, leave it, and choose the device.

Grade it with `pytest docs/course -k lesson2`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch

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
    raise NotImplementedError


def run(rank: int, world_size: int, init_method: str, work: Callable[[], R]) -> R:
    """Join the default process group with the gloo backend, and return what `work()` returns.

    Leave the group in every case, also if `work` raises.

    Args:
        rank: the number of this process.
        world_size: how many processes there are.
        init_method: where the ranks meet, such as "tcp://localhost:29500".
        work: calls collectives.
    """
    raise NotImplementedError


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
    raise NotImplementedError
