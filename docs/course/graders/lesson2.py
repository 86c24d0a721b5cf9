"""Grader 2: variables of launchers, then three real processes that have no variables at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from grading import Wrong, check, on_ranks

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0"}
WORKERS = 3


def grade(lesson: ModuleType) -> None:
    for environ, expected in [
        (TORCHRUN, (5, 8, 1)),
        (SRUN, (3, 6, 0)),
        (SRUN | TORCHRUN, (5, 8, 1)),
        ({"HOME": "/root"}, (0, 1, 0)),
    ]:
        found = lesson.place(environ)
        check(found == expected, f"place({environ}) returned {found}, not {expected}.")
    for missing in TORCHRUN:
        check_refused(lesson, missing, {n: v for n, v in TORCHRUN.items() if n != missing})
        check_refused(lesson, missing, SRUN | {n: v for n, v in TORCHRUN.items() if n != missing})
    for missing in SRUN:
        check_refused(lesson, missing, {n: v for n, v in SRUN.items() if n != missing})

    with tempfile.TemporaryDirectory() as folder:
        results = on_ranks(joined, WORKERS, lesson.run, f"{folder}/store", open_world=False)
    for rank, result in enumerate(results):
        check_rank(rank, *result)


def check_refused(lesson: ModuleType, missing: str, environ: dict[str, str]) -> None:
    try:
        found = lesson.place(environ)
    except ValueError as error:
        check(missing in str(error), f"The ValueError must name {missing}. It says: {error}")
    else:
        raise Wrong(f"{missing} is missing in {environ}, and place() returned {found}.")


def joined(run: Callable[..., object], store: str) -> tuple[object, bool, bool, bool]:
    """On a rank: what `run` returned, whether a group was left open, whether the exception of
    `work` came out of it, and whether a group was left open then.
    """
    rank = int(os.environ["RANK"])
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith(("MASTER_", "SLURM_", "TORCHELASTIC_")):
            del os.environ[name]
    init_method = f"file://{store}"
    stores: list[bool] = []

    def work_and_look() -> tuple[int, int, str, int]:
        stores.append(Path(store).exists())
        return work()

    result = run(rank, WORKERS, init_method, work_and_look)
    if stores == [False]:
        raise Wrong(
            f"run() joined a group, but not at init_method={init_method!r}. Give init_method, rank "
            "and world_size to init_process_group. Then no variables and no port are needed."
        )
    left_open = dist.is_initialized()
    if left_open:
        dist.destroy_process_group()
    try:
        run(rank, WORKERS, init_method + "-2", fails)
    except ZeroDivisionError:
        raised = True
    else:
        raised = False
    return result, left_open, raised, dist.is_initialized()


def work() -> tuple[int, int, str, int]:
    total = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), int(total)


def fails() -> None:
    dist.barrier()  # a rank that leaves while another still connects to it would end that one too
    raise ZeroDivisionError


def check_rank(
    rank: int, result: object, left_open: bool, raised: bool, left_open_then: bool
) -> None:
    expected = (rank, WORKERS, "gloo", 111)
    check(
        result == expected,
        f"On rank {rank} work() returned {expected} (rank, world size, backend, a sum), and run() "
        f"returned {result}.",
    )
    check(not left_open, f"On rank {rank} the process group was still open after run().")
    check(raised, f"work() raised an exception on rank {rank}. It did not come out of run().")
    check(
        not left_open_then,
        f"On rank {rank} the process group was still open after work() had raised an exception.",
    )
