"""One helper for every test that needs several ranks: start them fast, never wait for ever, show the failing rank's traceback."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

from lockstep.launcher.spawn import check_importable, start_ranks

if TYPE_CHECKING:
    from lockstep.world import World

R = TypeVar("R")

_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the first optimizer that a process makes imports it: two seconds, in every rank
    "lockstep.world",
    "lockstep.launcher.rank_process",
    "lockstep.testing.ranks",
    "lockstep.stepper",
)
_IF_IN_USE = ("pytest", "hypothesis", "numpy", "torch.utils.data")  # what test modules import, and each rank would import again


def run_ranks(
    fn: Callable[Concatenate[World, ...], R],
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: timedelta = timedelta(seconds=60),
) -> list[R]:
    """Run `fn(world, *args, **kwargs)` on `workers` gloo ranks of this host and return their results by rank.

    Each rank has one intra-op thread, so that results do not depend on the machine, and no port is picked. Ranks are forked from a
    server that has torch loaded: the first call takes what importing torch takes, later ones a fraction of a second. They begin
    with the caller's environment, working directory and sys.path. `fn` must be importable: defined at the top of a module.

    Raises:
        WorkerFailed: a rank failed; `rank` is the first that did, the message holds its own traceback. The others have been killed.
        LaunchTimeout: ranks were still running at `timeout`; they have been killed.
    """
    check_importable(fn)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *(name for name in _IF_IN_USE if name in sys.modules)])
    return start_ranks(context, _with_world, workers, (fn, *args), kwargs or {}, timeout=timeout)


def _with_world(fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    import torch

    from lockstep.world import init

    with init(backend="gloo") as world:
        torch.set_num_threads(1)
        return fn(world, *args, **kwargs)
