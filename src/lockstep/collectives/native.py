"""The backend's own collectives, with the same meaning on every backend: any dtype that it can
move, any strides, pieces of different lengths.

Four of them can also go through memory that the ranks share (`memory`,
shared_memory/operations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.group import Group, NativeWork
from lockstep.collectives.reduce_op import REDUCE_OPS, Op, check_op, check_rows, working_dtype
from lockstep.collectives.shared_memory.operations import HostMemory
from lockstep.collectives.tensor_spec import (
    TensorSpec,
    arriving_forms,
    from_bytes,
    gathered_forms,
    padded,
    room_for,
    scattered_forms,
)
from lockstep.collectives.work import Handle, Work
from lockstep.errors import UsageError

IN_MEMORY = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
"""The collectives that can go through shared memory."""

_all_gather_flat: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_flat: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def memory_of(group: Group, asked_by: str = "algorithm") -> HostMemory:
    """Return the group's shared memory. If it has none, raise a UsageError that names the option
    `asked_by`.
    """
    if group.memory is None:
        raise UsageError("shared-memory-impossible", what=f"{asked_by}='shared_memory'")
    return group.memory


def all_reduce(
    group: Group, tensor: Tensor, op: Op, memory: HostMemory | None = None
) -> Handle[Tensor]:
    """Replace `tensor` on every rank by the sum (mean, ...) over all ranks."""
    reduce: Callable[..., Work] = group.backend_all_reduce if memory is None else memory.all_reduce
    return Handle([reduce(tensor, op)], lambda: tensor)


def broadcast(
    group: Group, tensor: Tensor, root: int, memory: HostMemory | None = None
) -> Handle[Tensor]:
    """Replace `tensor` on every rank by that of rank `root`."""
    send: Callable[..., Work] = group.backend_broadcast if memory is None else memory.broadcast
    return Handle([send(tensor, root)], lambda: tensor)


def reduce(group: Group, tensor: Tensor, root: int, op: Op) -> Handle[Tensor]:
    """Replace rank `root`'s tensor by the sum (mean, ...) over all ranks. The other ranks' tensors
    are not changed.
    """
    group.check_root(root)
    check_op(op, tensor)
    group.announce("reduce", tensor, f"{op} to {root}", None, _unless(root, group, tensor.nbytes))
    if group.size == 1 or tensor.numel() == 0:
        return Handle([], lambda: tensor)
    # A copy: gloo uses the tensors of the other ranks as scratch memory.
    total = tensor.detach().to(
        working_dtype(tensor), copy=True, memory_format=torch.contiguous_format
    )
    work = dist.reduce(
        total, dst=group.ranks[root], op=REDUCE_OPS[op], group=group.process_group, async_op=True
    )

    def finish() -> Tensor:
        if group.rank == root:
            with torch.no_grad():
                tensor.copy_(total.div_(group.size) if op == "mean" else total)
        return tensor

    return Handle([NativeWork(group, work)], finish)


def reduce_scatter(
    group: Group, tensor: Tensor, op: Op, memory: HostMemory | None = None
) -> Handle[Tensor]:
    """Give this rank its rows of the sum over all ranks. They are cut as `torch.tensor_split` cuts
    them: the first parts are one row longer.
    """
    check_op(op, tensor)
    check_rows(tensor)
    working = tensor.dtype if memory is not None else working_dtype(tensor)
    parts = list(tensor.detach().to(working).tensor_split(group.size))
    rows, own = parts[0].shape[0], parts[group.rank].shape[0]
    for rank, part in enumerate(parts):
        if part.shape[0] < rows:  # all parts need the same shape
            parts[rank] = torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
    mine = torch.empty_like(parts[group.rank], memory_format=torch.contiguous_format)
    if memory is not None:
        return Handle([memory.reduce_scatter(mine, parts, op)], lambda: mine[:own])
    sends = (group.size - 1) * tensor.nbytes // group.size
    group.announce("reduce_scatter", tensor, op, None, sends)
    if group.size == 1 or mine.numel() == 0:
        return Handle([], lambda: tensor.detach().tensor_split(group.size)[group.rank].clone())
    work = _reduce_scatter_flat(
        mine, torch.cat(parts), op=REDUCE_OPS[op], group=group.process_group, async_op=True
    )

    def finish() -> Tensor:
        return (mine.div_(group.size) if op == "mean" else mine)[:own].to(tensor.dtype)

    return Handle([NativeWork(group, work)], finish)


def all_gather(
    group: Group, tensor: Tensor, memory: HostMemory | None = None
) -> Handle[list[Tensor]]:
    """Give every rank all ranks' tensors, by rank. Dim 0 may have a different length on each."""
    forms = gathered_forms(group, "all_gather", tensor)
    room = room_for(forms)
    mine = padded(tensor, room)
    if memory is not None:
        # separate tensors: a caller that keeps one does not keep the others
        apart = [mine.new_empty(room) for _ in forms]
        return Handle([memory.all_gather(apart, mine)], lambda: list(map(from_bytes, apart, forms)))
    everyone = mine.new_empty(group.size * room)
    pieces = everyone.split(room) if room else [everyone] * group.size

    def finish() -> list[Tensor]:
        return list(map(from_bytes, pieces, forms))

    group.announce("all_gather", mine, "bytes", None, sends=(group.size - 1) * room)
    if group.size == 1 or room == 0:
        everyone.copy_(mine)
        return Handle([], finish)
    work = _all_gather_flat(everyone, mine, group=group.process_group, async_op=True)
    return Handle([NativeWork(group, work)], finish)


def gather(group: Group, tensor: Tensor, root: int) -> Handle[list[Tensor] | None]:
    """Give rank `root` every rank's tensor, by rank, and the others None. Dim 0 may have a
    different length on each.
    """
    group.check_root(root)
    forms = gathered_forms(group, "gather", tensor)
    room = room_for(forms)
    mine = padded(tensor, room)
    group.announce("gather", mine, f"to {root}", None, _unless(root, group, room))
    pieces = [mine.new_empty(room) for _ in forms] if group.rank == root else None

    def finish() -> list[Tensor] | None:
        return pieces and [from_bytes(*pair) for pair in zip(pieces, forms, strict=True)]

    if group.size == 1 or room == 0:
        for piece in pieces or ():
            piece.copy_(mine)
        return Handle([], finish)
    work = dist.gather(
        mine, pieces, dst=group.ranks[root], group=group.process_group, async_op=True
    )
    return Handle([NativeWork(group, work)], finish)


def scatter(group: Group, tensors: Sequence[Tensor] | None, root: int) -> Handle[Tensor]:
    """Give every rank its tensor of rank `root`'s list. The list has one tensor for each rank, all
    of one dtype; shapes may differ.
    """
    forms, like = scattered_forms(group, tensors, root)
    room = room_for(forms)
    mine = like.new_empty(room)
    sends = (group.size - 1) * room if group.rank == root else 0
    group.announce("scatter", mine, f"from {root}", None, sends)
    pieces = [padded(tensor, room) for tensor in tensors] if tensors is not None else None

    def finish() -> Tensor:
        return from_bytes(mine, forms[group.rank])

    if group.size == 1 or room == 0:
        if pieces is not None:
            mine.copy_(pieces[group.rank])
        return Handle([], finish)
    work = dist.scatter(
        mine, pieces, src=group.ranks[root], group=group.process_group, async_op=True
    )
    return Handle([NativeWork(group, work)], finish)


def all_to_all(group: Group, tensors: Sequence[Tensor]) -> Handle[list[Tensor]]:
    """Give every rank one tensor from each rank: `tensors[r]` goes to rank r. Shapes may differ,
    the dtype may not.
    """
    arriving = arriving_forms(group, tensors)
    leaving = [TensorSpec.of(tensor).bytes for tensor in tensors]
    octets = torch.cat(
        [padded(tensor, size) for tensor, size in zip(tensors, leaving, strict=True)]
    )
    group.announce("all_to_all", octets[:0], "", None, sends=sum(leaving) - leaving[group.rank])
    sizes = [form.bytes for form in arriving]
    arrived = octets.new_empty(sum(sizes))

    def finish() -> list[Tensor]:
        # clone: a piece of the buffer may be misaligned, and would keep the whole buffer alive
        pairs = zip(arrived.split(sizes), arriving, strict=True)
        return [from_bytes(piece.clone(), form) for piece, form in pairs]

    if group.size == 1:
        arrived.copy_(octets)
        return Handle([], finish)
    work = dist.all_to_all_single(
        arrived, octets, sizes, leaving, group=group.process_group, async_op=True
    )
    return Handle([NativeWork(group, work)], finish)


def _unless(root: int, group: Group, bytes: int) -> int:
    """Return the number of bytes that this rank sends to the root: 0 if it is the root."""
    return 0 if group.rank == root else bytes
