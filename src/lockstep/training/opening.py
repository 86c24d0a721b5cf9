"""What a training runs in: the world, the run directory, and how this process computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.collectives.broadcast_json import said_by
from lockstep.config.knob import knobs
from lockstep.config.settings import Config, Device, Settings
from lockstep.config.task import Precision
from lockstep.errors import ExitCode, PeerFailed, UsageError
from lockstep.training.run_directory import RunDirectory, claimed
from lockstep.world.world import World, init


def backend_of(device: Device) -> str | None:
    """Return the backend for `lockstep.init`; None lets the hardware decide."""
    return {"auto": None, "cpu": "gloo", "cuda": "nccl"}[device]


def computing(settings: Settings, world: World) -> AbstractContextManager[object]:
    """Return a context that sets how this process computes while it trains. In exact mode the call
    itself sets it, until the world closes.
    """
    if settings.exact:
        return nullcontext(world.compute_deterministically(settings.threads))
    return intra_op_threads(settings.threads)


@contextmanager
def intra_op_threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads in this process within the block. None keeps the number that is
    set (the cores of the host, shared among its ranks).
    """
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """With tf32, allow float32 matrix products to round their factors to 10 bits within the
    block. The old setting is restored.
    """
    before = torch.get_float32_matmul_precision()
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def grad_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a GradScaler for fp16, whose range is too small for small gradients; else None."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


@contextmanager
def world_for(world: World | None, device: Device) -> Iterator[World]:
    """Yield the given world, else the open one, else a new one for this training."""
    knobs(Config)["device"].check(device)
    if world is None and not dist.is_initialized():
        with init(backend=backend_of(device)) as own:
            try:
                yield own
            except SystemExit:  # a task that calls sys.exit() fails, whatever the code
                own.close(failed=True)
                raise
        return
    world = world or World.current()
    if device not in ("auto", world.device.type):
        raise UsageError("device-of-the-open-world", device=device, open=world.device.type)
    yield world


@contextmanager
def run_directory_for(
    run: Path | str | RunDirectory | None, settings: Settings, world: World
) -> Iterator[RunDirectory | None]:
    """Yield the run directory on all ranks."""
    if run is None or isinstance(run, RunDirectory):
        yield run
        return
    path = Path(run)
    refused = PeerFailed("rank-0-failed", what=f"use the run directory {path}")
    claim = partial(claimed, settings, path, resume=False, fresh=False)
    with claimed_by_first(world, claim, lambda code: refused) as directory:
        yield directory


@contextmanager
def claimed_by_first(
    world: World, claim: Callable[[], RunDirectory], refused: Callable[[int], BaseException]
) -> Iterator[RunDirectory]:
    """Yield on all ranks the folder that rank 0 claims, and may have named. If rank 0 cannot claim
    it, the others raise what `refused` returns for its exit code.
    """
    own: RunDirectory | None = None
    problem: BaseException | None = None
    if world.rank == 0:
        try:
            own = claim()
        except (UsageError, OSError, SystemExit) as error:
            problem = error
    code = 0 if problem is None else _exit_code(problem)
    path = None if own is None else str(own.path.absolute())
    code, path = said_by(0, [code, path], world.control, "for the run directory")
    if code:
        raise problem or refused(code)
    with own or RunDirectory.of_launcher(Path(path)) as directory:
        yield directory


def _exit_code(problem: BaseException) -> int:
    if isinstance(problem, SystemExit):
        return int(problem.code or 0)
    return ExitCode.USAGE if isinstance(problem, UsageError) else ExitCode.FAILED
