"""Ranks that no launcher has started: the test's own process forks them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

R = TypeVar("R")


def run_siblings(fn: Callable[..., R], count: int, *args: Any) -> tuple[list[R | None], list[int]]:
    """Call `fn(rank, *args)` in `count` children of this process.

    Returns:
        What each returned, None for one that has died before; and their pids.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    children = [
        context.Process(target=_sibling, args=(fn, rank, args, remote))
        for rank, (_, remote) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    results = []
    for local, remote in pipes:
        remote.close()
        results.append(_received(local))
        local.close()
    for child in children:
        child.join()
    return results, [child.pid or 0 for child in children]


def _sibling(fn: Callable[..., Any], rank: int, args: tuple[Any, ...], remote: Connection) -> None:
    torch.set_num_threads(1)
    remote.send(fn(rank, *args))
    os._exit(0)  # its world may be open, and the other ranks dead


def _received(local: Connection) -> Any:
    try:
        return local.recv()
    except EOFError:
        return None
