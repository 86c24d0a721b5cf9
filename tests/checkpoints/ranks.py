"""Teams whose functions make `Checkpoints`, which have a process group of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, TypeVar

import torch.distributed as dist

from lockstep.world.world import World
from tests.teams import on_team

R = TypeVar("R")


def on_ranks(
    fn: Callable[Concatenate[World, ...], R],
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[R]:
    """`on_team`, where what is left of `fn` may be process groups: a world keeps those of its
    Checkpoints until it closes, and a team's world stays.
    """
    return on_team(_forgetting_groups, workers, args=(fn, args, kwargs or {}))


def _forgetting_groups(
    world: World, fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> R:
    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    result = fn(world, *args, **kwargs)
    # not destroyed: torch would give their names, which the world's store knows, to the next ones
    for group in set(groups) - before:
        groups.pop(group)
    return result
