"""The collectives as functions, for users: `lockstep.collectives.all_reduce(tensor)`.

Each takes `group`: a `lockstep.collectives.Group` or a torch process group; None is the group of all ranks.
"""

from __future__ import annotations

from typing import Literal, overload

import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.central import central_all_reduce
from lockstep.collectives.group import Done, Group, Op, Work
from lockstep.errors import UsageError

Algorithm = Literal["native", "central"]
ALGORITHMS: tuple[Algorithm, ...] = ("native", "central")


def resolve(group: Group | dist.ProcessGroup | None) -> Group:
    if group is None:
        return Group.default()
    if isinstance(group, Group):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError("this process is not a member of that group: only members may call its collectives")
    return Group.of(group)


def start_all_reduce(group: Group, tensor: Tensor, op: Op = "sum", algorithm: str = "native") -> Work:
    """Start an all-reduce by the named algorithm."""
    if algorithm == "native":
        return group.all_reduce(tensor, op)
    if algorithm == "central":
        central_all_reduce(group, tensor, op)
        return Done()
    raise UsageError(f"algorithm={algorithm!r} is unknown: choose one of {', '.join(ALGORITHMS)}")


@overload
def all_reduce(
    tensor: Tensor,
    op: Op = ...,
    *,
    algorithm: Algorithm = ...,
    group: Group | dist.ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def all_reduce(
    tensor: Tensor, op: Op = ..., *, algorithm: Algorithm = ..., group: Group | dist.ProcessGroup | None = ..., async_op: Literal[True]
) -> Work: ...
def all_reduce(
    tensor: Tensor,
    op: Op = "sum",
    *,
    algorithm: Algorithm = "native",
    group: Group | dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Tensor | Work:
    """Replace `tensor` on every rank by the sum (mean, max, min, prod) over all ranks, in place; return it.

    With `async_op=True` return a handle at once: `handle.wait()` before the tensor is touched; several may be in flight.
    `algorithm` is "native" (what the backend does) or "central" (through rank 0: the naive reference, never asynchronous).
    Raises UsageError for an unknown operation or algorithm, and for a mean of integers.
    """
    work = start_all_reduce(resolve(group), tensor, op, algorithm)
    if async_op:
        return work
    work.wait()
    return tensor


def broadcast(tensor: Tensor, root: int = 0, *, group: Group | dist.ProcessGroup | None = None) -> Tensor:
    """Replace `tensor` on every rank by that of rank `root` of the group, in place; return it."""
    resolve(group).broadcast(tensor, root).wait()
    return tensor


def all_gather(tensor: Tensor, *, group: Group | dist.ProcessGroup | None = None) -> Tensor:
    """Every rank's tensor, joined along dim 0 in the order of ranks; a 0-d tensor gives one element a rank. Shapes must be equal."""
    return resolve(group).all_gather(tensor)
