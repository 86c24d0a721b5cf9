"""The collectives as functions, for users: `lockstep.collectives.all_reduce(tensor)`.

All take the same keywords:

`group`      a `lockstep.collectives.Group` (as `world.subgroup(ranks)` gives), a torch process
             group, or None: all ranks. `root` is a place in it.
`algorithm`  "native" is the backend's own collective; the others are written out (algorithms/) and
             run over messages of any backend: central (one
             rank after the other), ring, tree, recursive_doubling, halving_doubling, direct,
             hierarchical, doubling, halving. "shared_memory", where all ranks are on one CPU host,
             does all_reduce, broadcast, all_gather and reduce_scatter. "auto" chooses.
`async_op`   True returns a handle at once: `handle.wait()` gives the result, and nothing may touch
             the tensors before. Several may be in
             flight; all ranks issue the same ones in the same order.
`op`         sum, mean, max, min, prod or a torch ReduceOp. A mean divides once, at the end, and is
             refused for integers.

All ranks of the group call the same collective, from the same line. On one host, other shapes,
dtypes or orders raise CollectiveMismatch on all ranks before anything is sent; a rank that dies
raises PeerFailed on the others. Any dtype that torch adds up, any strides, also empty and 0-d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives import by_memory, by_schedule, native
from lockstep.collectives.algorithms import Algorithm, algorithms_of
from lockstep.collectives.group import OF_TORCH, Group, Op, Work
from lockstep.collectives.handle import Handle, Later
from lockstep.collectives.inference_mode import of_ordinary_tensors
from lockstep.collectives.schedule import Kind
from lockstep.errors import UsageError

SHARED_MEMORY = "shared_memory"
T = TypeVar("T")
AnyGroup = Group | dist.ProcessGroup | None
AnyOp = Op | dist.ReduceOp | Any  # torch's ReduceOp.SUM is of another, hidden type


@overload
def all_reduce(
    tensor: Tensor,
    op: AnyOp = ...,
    *,
    algorithm: Algorithm = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def all_reduce(
    tensor: Tensor,
    op: AnyOp = ...,
    *,
    algorithm: Algorithm = ...,
    group: AnyGroup = ...,
    async_op: Literal[True],
) -> Work: ...
@of_ordinary_tensors
def all_reduce(
    tensor: Tensor,
    op: AnyOp = "sum",
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Tensor | Work:
    """Replace `tensor` on every rank by the sum (mean, max, min, prod) over all ranks, in place;
    return it, or a handle.
    """
    found, op = resolve(group), _op(op)
    name = _choose(found, "all_reduce", algorithm, tensor)
    if name == "native":
        handle = Handle([found.all_reduce(tensor, op)], lambda: tensor)
        return handle if async_op else handle.wait()
    if name == SHARED_MEMORY:
        return _answer(by_memory.all_reduce(found, tensor, op), async_op)
    nodes = found.ranks_per_node if name == "hierarchical" else None
    run = by_schedule.all_reduce(found, tensor, op, name, _label(algorithm), nodes)
    return Later(found.in_background(run)) if async_op else run()


@of_ordinary_tensors
def broadcast(
    tensor: Tensor,
    root: int = 0,
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Replace `tensor` on every rank by that of rank `root` of the group, in place; return it,
    or a handle.
    """
    found = resolve(group)
    name = _choose(found, "broadcast", algorithm, tensor)
    if name == "native":
        return _answer(Handle([found.broadcast(tensor, root)], lambda: tensor), async_op)
    if name == SHARED_MEMORY:
        return _answer(by_memory.broadcast(found, tensor, root), async_op)
    return _run(
        found, by_schedule.broadcast(found, tensor, root, name, _label(algorithm)), async_op
    )


@of_ordinary_tensors
def reduce(
    tensor: Tensor,
    root: int = 0,
    op: AnyOp = "sum",
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Replace `tensor` on rank `root` by the sum (mean, ...) over all ranks; on the others it
    stays as it is. Return it, or a handle.
    """
    found, op = resolve(group), _op(op)
    name = _choose(found, "reduce", algorithm, tensor)
    if name == "native":
        return _answer(native.reduce(found, tensor, root, op), async_op)
    return _run(
        found, by_schedule.reduce(found, tensor, root, op, name, _label(algorithm)), async_op
    )


@of_ordinary_tensors
def all_gather(
    tensor: Tensor,
    *,
    as_list: bool = False,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Every rank's tensor, joined along dim 0 in the order of ranks (0-d: one element a rank), or
    with `as_list` one tensor for each.

    Dim 0 may have another length on each rank, which costs one small message more to find out. Or a
    handle, with `async_op`.
    """
    found = resolve(group)
    name = _choose(found, "all_gather", algorithm, tensor)

    def shaped(pieces: list[Tensor]) -> Any:
        if as_list:
            return pieces
        return torch.cat(pieces) if tensor.dim() else torch.stack(pieces)

    if name in ("native", SHARED_MEMORY):
        handle = (native if name == "native" else by_memory).all_gather(found, tensor)
        return _answer(Handle([handle], lambda: shaped(handle.wait())), async_op)
    run = by_schedule.all_gather(found, tensor, name, _label(algorithm))
    return _run(found, lambda: shaped(run()), async_op)


@of_ordinary_tensors
def reduce_scatter(
    tensor: Tensor,
    op: AnyOp = "sum",
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """This rank's rows of the sum (mean, ...) over all ranks, as a new tensor, or a handle.
    `tensor` stays as it is.

    Rows are cut as `torch.tensor_split` cuts them: where their number does not divide, the first
    ranks get one more.
    """
    found, op = resolve(group), _op(op)
    name = _choose(found, "reduce_scatter", algorithm, tensor)
    if name == "native":
        return _answer(native.reduce_scatter(found, tensor, op), async_op)
    if name == SHARED_MEMORY:
        return _answer(by_memory.reduce_scatter(found, tensor, op), async_op)
    return _run(
        found, by_schedule.reduce_scatter(found, tensor, op, name, _label(algorithm)), async_op
    )


@of_ordinary_tensors
def scatter(
    tensors: Sequence[Tensor] | None = None,
    root: int = 0,
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """This rank's tensor of the list that rank `root` gives, one for each rank, or a handle. The
    others give None. Shapes may differ.
    """
    found = resolve(group)
    name = _choose(found, "scatter", algorithm, None)
    device = tensors[0].device if tensors else _device(found)
    if name == "native":
        return _answer(native.scatter(found, tensors, root, device), async_op)
    return _run(
        found, by_schedule.scatter(found, tensors, root, device, name, _label(algorithm)), async_op
    )


@of_ordinary_tensors
def gather(
    tensor: Tensor,
    root: int = 0,
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """On rank `root` a list of every rank's tensor, elsewhere None; or a handle. Dim 0 may have
    another length on each rank.
    """
    found = resolve(group)
    name = _choose(found, "gather", algorithm, tensor)
    if name == "native":
        return _answer(native.gather(found, tensor, root), async_op)
    return _run(found, by_schedule.gather(found, tensor, root, name, _label(algorithm)), async_op)


@of_ordinary_tensors
def all_to_all(
    tensors: Sequence[Tensor],
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """A list of what each rank has for this one, or a handle: `tensors[r]` goes to rank r of the
    group. Shapes may differ, the dtype not.
    """
    found = resolve(group)
    name = _choose(found, "all_to_all", algorithm, None)
    if name == "native":
        return _answer(native.all_to_all(found, tensors), async_op)
    return _run(found, by_schedule.all_to_all(found, tensors, name, _label(algorithm)), async_op)


def resolve(group: AnyGroup) -> Group:
    """The Group that is meant. Raises UsageError for one that this rank is not in."""
    if group is None:
        return Group.default()
    if isinstance(group, Group):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            "this process is not a member of that group: only members may call its collectives"
        )
    return Group.of(group)


def _op(op: AnyOp) -> Any:
    """The name of an operation; what is unknown is refused where it is used."""
    if isinstance(op, str):
        return op
    return OF_TORCH.get(op, str(op))


def _choose(group: Group, kind: Kind, algorithm: str, tensor: Tensor | None) -> str:
    if kind in by_memory.KINDS and (
        algorithm == SHARED_MEMORY or (algorithm == "auto" and group.memory is not None)
    ):
        by_memory.memory_of(group)
        return SHARED_MEMORY
    if algorithm == "auto":
        return group.tuning.choose(
            kind, 0 if tensor is None else tensor.numel() * tensor.element_size(), group.size
        )
    if algorithm != "native" and algorithm not in algorithms_of(kind):
        raise UsageError(
            f"algorithm={algorithm!r} is unknown for {kind}: choose one of auto, native,"
            f" {', '.join(algorithms_of(kind))}"
        )
    return algorithm


def _label(algorithm: str) -> str:
    """What other ranks are told of the algorithm: it must be the same where it was chosen, else
    it follows from what is the same.
    """
    return "" if algorithm == "auto" else f" by {algorithm}"


def _device(group: Group) -> torch.device:
    if dist.get_backend(group.process_group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _answer(handle: Handle[T], async_op: bool) -> T | Handle[T]:
    return handle if async_op else handle.wait()


def _run(group: Group, run: Callable[[], T], async_op: bool) -> Any:
    return Later(group.in_background(run)) if async_op else run()
