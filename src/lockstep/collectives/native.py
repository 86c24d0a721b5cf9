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
    arriving_forms,
    as_bytes,
    from_bytes,
    gathered_forms,
    padded,
    padded_size,
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


def memory_of(group: Group, option: str = "algorithm") -> HostMemory:
    """Return the group's shared memory. If it has none, raise a UsageError that names the
    `option`.
    """
    if group.memory is None:
        raise UsageError("shared-memory-impossible", what=f"{option}='shared_memory'")
    return group.memory


def all_reduce(
    group: Group, tensor: Tensor, op: Op, memory: HostMemory | None = None
) -> Handle[Tensor]:
    """Replace `tensor` on every rank by the sum (mean, ...) over all ranks."""
    if memory is None:
        work: Work = group.backend_all_reduce(tensor, op)
    else:
        work = memory.all_reduce(tensor, op)
    return Handle([work], lambda: tensor)


def broadcast(
    group: Group, tensor: Tensor, root: int, memory: HostMemory | None = None
) -> Handle[Tensor]:
    """Replace `tensor` on every rank by that of rank `root`."""
    if memory is None:
        work: Work = group.backend_broadcast(tensor, root)
    else:
        work = memory.broadcast(tensor, root)
    return Handle([work], lambda: tensor)


def reduce(group: Group, tensor: Tensor, root: int, op: Op) -> Handle[Tensor]:
    """Replace rank `root`'s tensor by the sum (mean, ...) over all ranks. The other ranks' tensors
    are not changed.
    """
    group.check_root(root)
    check_op(op, tensor)
    sends = 0 if group.rank == root else tensor.nbytes
    group.announce("reduce", tensor, f"{op} to {root}", None, sends)
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
            if op == "mean":
                total.div_(group.size)
            with torch.no_grad():
                tensor.copy_(total)
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
    size = group.size
    working = tensor.dtype if memory is not None else working_dtype(tensor)
    parts = list(tensor.detach().to(working).tensor_split(size))
    most_rows = parts[0].shape[0]
    rows = parts[group.rank].shape[0]
    for rank, part in enumerate(parts):
        missing = most_rows - part.shape[0]
        if missing:  # all parts need the same shape
            parts[rank] = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
    local = torch.empty_like(parts[group.rank], memory_format=torch.contiguous_format)
    if memory is not None:
        return Handle([memory.reduce_scatter(local, parts, op)], lambda: local[:rows])
    sends = (size - 1) * tensor.nbytes // size
    group.announce("reduce_scatter", tensor, op, None, sends)
    if size == 1 or local.numel() == 0:
        return Handle([], lambda: tensor.detach().tensor_split(size)[group.rank].clone())
    work = _reduce_scatter_flat(
        local, torch.cat(parts), op=REDUCE_OPS[op], group=group.process_group, async_op=True
    )

    def finish() -> Tensor:
        if op == "mean":
            local.div_(size)
        return local[:rows].to(tensor.dtype)

    return Handle([NativeWork(group, work)], finish)


def all_gather(
    group: Group, tensor: Tensor, memory: HostMemory | None = None
) -> Handle[list[Tensor]]:
    """Give every rank all ranks' tensors, by rank. Dim 0 may have a different length on each."""
    forms = gathered_forms(group, "all_gather", tensor)
    size = padded_size(forms)
    local = padded(tensor, size)

    def finish() -> list[Tensor]:
        return list(map(from_bytes, pieces, forms))

    pieces: Sequence[Tensor]
    if memory is not None:
        # separate tensors: a caller that keeps one does not keep the others
        pieces = [local.new_empty(size) for _ in forms]
        return Handle([memory.all_gather(pieces, local)], finish)
    flat = local.new_empty(group.size * size)
    pieces = flat.split(size) if size else [flat] * group.size
    group.announce("all_gather", local, "bytes", None, sends=(group.size - 1) * size)
    if group.size == 1 or size == 0:
        flat.copy_(local)
        return Handle([], finish)
    work = _all_gather_flat(flat, local, group=group.process_group, async_op=True)
    return Handle([NativeWork(group, work)], finish)


def gather(group: Group, tensor: Tensor, root: int) -> Handle[list[Tensor] | None]:
    """Give rank `root` every rank's tensor, by rank, and the others None. Dim 0 may have a
    different length on each.
    """
    group.check_root(root)
    forms = gathered_forms(group, "gather", tensor)
    size = padded_size(forms)
    local = padded(tensor, size)
    pieces = None
    sends = size
    if group.rank == root:
        pieces = [local.new_empty(size) for _ in forms]
        sends = 0
    group.announce("gather", local, f"to {root}", None, sends)

    def finish() -> list[Tensor] | None:
        if pieces is None:
            return None
        return list(map(from_bytes, pieces, forms))

    if group.size == 1 or size == 0:
        for piece in pieces or ():
            piece.copy_(local)
        return Handle([], finish)
    work = dist.gather(
        local, pieces, dst=group.ranks[root], group=group.process_group, async_op=True
    )
    return Handle([NativeWork(group, work)], finish)


def scatter(group: Group, tensors: Sequence[Tensor] | None, root: int) -> Handle[Tensor]:
    """Give every rank its tensor of rank `root`'s list. The list has one tensor for each rank, all
    of one dtype; shapes may differ.
    """
    forms, like = scattered_forms(group, tensors, root)
    size = padded_size(forms)
    local = like.new_empty(size)
    sends = (group.size - 1) * size if group.rank == root else 0
    group.announce("scatter", local, f"from {root}", None, sends)
    pieces = None
    if tensors is not None:
        pieces = [padded(tensor, size) for tensor in tensors]

    def finish() -> Tensor:
        return from_bytes(local, forms[group.rank])

    if group.size == 1 or size == 0:
        if pieces is not None:
            local.copy_(pieces[group.rank])
        return Handle([], finish)
    work = dist.scatter(
        local, pieces, src=group.ranks[root], group=group.process_group, async_op=True
    )
    return Handle([NativeWork(group, work)], finish)


def all_to_all(group: Group, tensors: Sequence[Tensor]) -> Handle[list[Tensor]]:
    """Give every rank one tensor from each rank: `tensors[r]` goes to rank r. Shapes may differ,
    the dtype may not.
    """
    forms = arriving_forms(group, tensors)
    receive_sizes = [form.bytes for form in forms]
    pieces = [as_bytes(tensor) for tensor in tensors]
    send_sizes = [piece.numel() for piece in pieces]
    outgoing = torch.cat(pieces)
    sends = sum(send_sizes) - send_sizes[group.rank]
    group.announce("all_to_all", outgoing[:0], "", None, sends)
    incoming = outgoing.new_empty(sum(receive_sizes))

    def finish() -> list[Tensor]:
        # clone: a piece of the buffer may be misaligned, and would keep the whole buffer alive
        pairs = zip(incoming.split(receive_sizes), forms, strict=True)
        return [from_bytes(piece.clone(), form) for piece, form in pairs]

    if group.size == 1:
        incoming.copy_(outgoing)
        return Handle([], finish)
    work = dist.all_to_all_single(
        incoming,
        outgoing,
        receive_sizes,
        send_sizes,
        group=group.process_group,
        async_op=True,
    )
    return Handle([NativeWork(group, work)], finish)
