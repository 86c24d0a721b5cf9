"""Grader 2: variables of launchers, then three real processes that have no variables at all. setup()
is also called with a GPU that does not exist, and on one to three real processes.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from grading import Wrong, check, on_ranks

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0"}
WORKERS = 3
BY_HAND = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
BY_LAUNCHER = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "31234",
}
TIMEOUT = timedelta(seconds=20)


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

    for gpus in (0, 4):
        check_setup(lesson, {}, BY_HAND, gpus)
        check_setup(lesson, BY_LAUNCHER, BY_LAUNCHER, gpus)
    for workers in (1, 2, 3):
        for rank, total in enumerate(on_ranks(set_up, workers, lesson.setup, open_world=False)):
            check(
                total == sum(10**other for other in range(workers)),
                f"After setup() on {workers} ranks, rank {rank} got the sum {total} from all_reduce.",
            )


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


def check_setup(
    lesson: ModuleType, launcher: dict[str, str], variables: dict[str, str], gpus: int
) -> None:
    """Call setup() with this number of GPUs, none of which exists, and a group that does not open.

    Args:
        launcher: the variables that a launcher has set.
        variables: what the variables must be when the group opens.
    """
    calls: list[str] = []
    seen: dict[str, Any] = {}
    parameters = inspect.signature(dist.init_process_group)

    def set_device(device: object) -> None:
        calls.append("set_device")
        seen["gpu"] = device if isinstance(device, int) else torch.device(str(device)).index

    def init_process_group(*args: Any, **options: Any) -> None:
        calls.append("init_process_group")
        seen.update(parameters.bind(*args, **options).arguments)
        seen["variables"] = {name: os.environ.get(name) for name in BY_HAND}

    others = {name: value for name, value in os.environ.items() if name not in BY_HAND}
    with ExitStack() as fakes:
        fakes.enter_context(mock.patch.dict(os.environ, others | launcher, clear=True))
        for module, name, fake in [
            (torch.cuda, "is_available", lambda: gpus > 0),
            (torch.cuda, "device_count", lambda: gpus),
            (torch.cuda, "set_device", set_device),
            (dist, "init_process_group", init_process_group),
        ]:
            fakes.enter_context(mock.patch.object(module, name, fake))
        device = lesson.setup(BY_HAND, TIMEOUT)
    check_variables(seen, launcher, variables)
    check_device(device, calls, seen, gpus, variables)
    backend = "nccl" if gpus else "gloo"
    check(
        str(seen.get("backend")) == backend,
        f"With {gpus} GPUs the backend is {backend}, and setup() opened the group with "
        f"{seen.get('backend')}.",
    )
    check(
        seen.get("timeout") == TIMEOUT,
        f"setup() was given timeout={TIMEOUT}, and opened the group with {seen.get('timeout')}.",
    )


def check_variables(
    seen: dict[str, Any], launcher: dict[str, str], variables: dict[str, str]
) -> None:
    check("variables" in seen, "setup() did not call torch.distributed.init_process_group.")
    for name, expected in variables.items():
        value = seen["variables"][name]
        sentence = (
            f"A launcher had set {name}={expected}, and setup() overwrote it with {value}. All ranks of "
            "the launcher meet at its address and port."
        )
        if not launcher:
            sentence = f"{name} was missing, and setup() left it at {value} instead of {expected}."
        check(value == expected, sentence)


def check_device(
    device: object, calls: list[str], seen: dict[str, Any], gpus: int, variables: dict[str, str]
) -> None:
    rank, local_rank = int(variables["RANK"]), int(variables["LOCAL_RANK"])
    if not gpus:
        check(
            "set_device" not in calls and device == torch.device("cpu"),
            f"There is no GPU, and setup() returned {device}. Return torch.device('cpu') then, and do "
            "not call torch.cuda.set_device.",
        )
        return
    check("set_device" in calls, "There is a GPU, and setup() did not call torch.cuda.set_device.")
    check(
        seen["gpu"] == local_rank or seen["gpu"] != rank,
        f"setup() chose GPU {rank}, the global rank. The second node has no such GPU: take LOCAL_RANK, "
        f"{local_rank}.",
    )
    check(
        seen["gpu"] == local_rank,
        f"LOCAL_RANK is {local_rank}, and setup() chose GPU {seen['gpu']}.",
    )
    check(
        calls.index("set_device") < calls.index("init_process_group"),
        "setup() opened the group before it chose the device. NCCL uses the current GPU: until then "
        "that is GPU 0 on every rank.",
    )
    check(
        device == torch.device("cuda", local_rank),
        f"setup() must return the device cuda:{local_rank}, and returned {device}.",
    )


def set_up(setup: Callable[[dict[str, str], timedelta], torch.device]) -> int:
    """On a rank without variables: a sum over the group that setup() has opened."""
    defaults = {name: os.environ.pop(name) for name in BY_HAND}
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        device = setup(defaults, TIMEOUT)
    try:
        total = torch.tensor(10 ** dist.get_rank(), device=device)
        dist.all_reduce(total)
        return int(total)
    finally:
        dist.destroy_process_group()
