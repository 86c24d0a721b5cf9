"""The backend's own collectives, made to mean the same on every backend: any dtype it can move, any
strides, pieces of different lengths.

`Group` has the three that the library lives on (all_reduce, broadcast, all_gather of equal shapes);
these are the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.forms import (
    ROW,
    Form,
    check_alike,
    exchange,
    from_bytes,
    padded,
    room_for,
)
from lockstep.collectives.group import REDUCE_OPS, Group, NativeWork, Op, check_op, working_dtype
from lockstep.collectives.handle import Handle
from lockstep.errors import UsageError

_all_gather_flat: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_flat: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def reduce(group: Group, tensor: Tensor, root: int, op: Op) -> Handle[Tensor]:
    """Replace rank `root`'s tensor by the sum (mean, ...) over all ranks; the others' stay as
    they are.
    """
    group.check_root(root)
    check_op(op, tensor)
    group.announce(
        "reduce", tensor, f"{op} to {root}", None, sends=0 if group.rank == root else _bytes(tensor)
    )
    if group.size == 1 or tensor.numel() == 0:
        return Handle([], lambda: tensor)
    # A copy: gloo uses the others' tensors as scratch.
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


def reduce_scatter(group: Group, tensor: Tensor, op: Op) -> Handle[Tensor]:
    """This rank's part of the sum over all ranks: rows cut as `torch.tensor_split` cuts them,
    the first parts one longer.
    """
    check_op(op, tensor)
    if tensor.dim() == 0:
        raise UsageError("reduce_scatter cuts rows, and a 0-d tensor has none: use all_reduce")
    group.announce(
        "reduce_scatter", tensor, op, None, sends=(group.size - 1) * _bytes(tensor) // group.size
    )
    parts = tensor.detach().to(working_dtype(tensor)).tensor_split(group.size)
    rows = parts[0].shape[0]
    mine = parts[group.rank].new_empty((rows, *tensor.shape[1:]))
    if group.size == 1 or mine.numel() == 0:
        return Handle([], lambda: tensor.detach().tensor_split(group.size)[group.rank].clone())
    whole = mine.new_zeros((group.size * rows, *tensor.shape[1:]))
    for rank, part in enumerate(parts):
        whole[rank * rows : rank * rows + part.shape[0]] = part
    work = _reduce_scatter_flat(
        mine, whole, op=REDUCE_OPS[op], group=group.process_group, async_op=True
    )

    def finish() -> Tensor:
        summed = mine[: parts[group.rank].shape[0]]
        return (summed.div_(group.size) if op == "mean" else summed).to(tensor.dtype)

    return Handle([NativeWork(group, work)], finish)


def all_gather(group: Group, tensor: Tensor) -> Handle[list[Tensor]]:
    """Every rank's tensor, by rank; dim 0 may have another length on each."""
    (forms,) = zip(*exchange(group, [Form.of(tensor)], "all_gather"), strict=True)
    check_alike("all_gather", forms, group)
    room = room_for(forms)
    mine = padded(tensor, room)
    group.announce("all_gather", mine, "bytes", None, sends=(group.size - 1) * room)
    everyone = mine.new_empty(group.size * room)
    work = None
    if group.size == 1 or room == 0:
        everyone.copy_(mine)
    else:
        work = _all_gather_flat(everyone, mine, group=group.process_group, async_op=True)
    pieces = everyone.split(room) if room else [everyone] * group.size
    return Handle(
        [NativeWork(group, work)] if work else [],
        lambda: [from_bytes(*pair) for pair in zip(pieces, forms, strict=True)],
    )


def gather(group: Group, tensor: Tensor, root: int) -> Handle[list[Tensor] | None]:
    """On rank `root` every rank's tensor, by rank; dim 0 may have another length on each. None
    on the others.
    """
    group.check_root(root)
    (forms,) = zip(*exchange(group, [Form.of(tensor)], "gather"), strict=True)
    check_alike("gather", forms, group)
    room = room_for(forms)
    mine = padded(tensor, room)
    group.announce("gather", mine, f"to {root}", None, sends=0 if group.rank == root else room)
    if group.size == 1 or room == 0:
        return Handle(
            [],
            lambda: (
                [from_bytes(mine, form).clone() for form in forms] if group.rank == root else None
            ),
        )
    pieces = list(mine.new_empty(group.size, room).unbind()) if group.rank == root else None
    work = dist.gather(
        mine, pieces, dst=group.ranks[root], group=group.process_group, async_op=True
    )

    def finish() -> list[Tensor] | None:
        return (
            [from_bytes(*pair) for pair in zip(pieces, forms, strict=True)]
            if pieces is not None
            else None
        )

    return Handle([NativeWork(group, work)], finish)


def scatter(
    group: Group, tensors: Sequence[Tensor] | None, root: int, device: torch.device
) -> Handle[Tensor]:
    """On every rank its tensor of rank `root`'s list, one for each rank, of one dtype; shapes
    may differ.
    """
    forms = scattered_forms(group, tensors, root)
    room = room_for(forms)
    form = forms[group.rank]
    mine = torch.empty(room, dtype=torch.uint8, device=device)
    group.announce(
        "scatter",
        mine,
        f"from {root}",
        None,
        sends=(group.size - 1) * room if group.rank == root else 0,
    )
    if group.size == 1 or room == 0:
        return Handle(
            [],
            lambda: (
                tensors[group.rank].detach().clone()
                if tensors is not None
                else from_bytes(mine, form)
            ),
        )
    pieces = [padded(tensor, room) for tensor in tensors] if tensors is not None else None
    work = dist.scatter(
        mine, pieces, src=group.ranks[root], group=group.process_group, async_op=True
    )
    return Handle([NativeWork(group, work)], lambda: from_bytes(mine, form))


def scattered_forms(group: Group, tensors: Sequence[Tensor] | None, root: int) -> list[Form]:
    """What rank `root` scatters, on all ranks. Refuses a list elsewhere, and one of another
    length, before anything is sent.
    """
    group.check_root(root)
    if (tensors is not None) != (group.rank == root):
        what = "a list" if tensors is not None else "no list"
        raise UsageError(
            f"scatter: rank {group.rank} of the group gave {what}: rank {root} gives one tensor for"
            " each rank, the others None"
        )
    if tensors is not None and len(tensors) != group.size:
        raise UsageError(
            f"scatter: {len(tensors)} tensors for {group.size} ranks: give one for each"
        )
    if tensors is not None and len({tensor.dtype for tensor in tensors}) > 1:
        raise UsageError("scatter: the tensors have different dtypes")
    table = torch.zeros(group.size, ROW, dtype=torch.int64)
    if tensors is not None:
        table = torch.tensor([Form.of(tensor).encode() for tensor in tensors], dtype=torch.int64)
    group.host.broadcast(table, root, text=f"scatter from {root}").wait()
    return [Form.decode(row) for row in table.tolist()]


def all_to_all(group: Group, tensors: Sequence[Tensor]) -> Handle[list[Tensor]]:
    """From every rank the tensor that it has for this one: `tensors[r]` goes to rank r. Shapes
    may differ, the dtype not.
    """
    arriving = arriving_forms(group, tensors)
    leaving = [Form.of(tensor).bytes for tensor in tensors]
    octets = torch.cat(
        [padded(tensor, size) for tensor, size in zip(tensors, leaving, strict=True)]
    )
    group.announce("all_to_all", octets[:0], "", None, sends=sum(leaving) - leaving[group.rank])
    sizes = [form.bytes for form in arriving]
    arrived = octets.new_empty(sum(sizes))
    work = None
    if group.size == 1:
        arrived.copy_(octets)
    else:
        work = dist.all_to_all_single(
            arrived, octets, sizes, leaving, group=group.process_group, async_op=True
        )
    # clone: pieces of one buffer could lie askew, and would keep all of it alive
    return Handle(
        [NativeWork(group, work)] if work else [],
        lambda: [
            from_bytes(piece.clone(), form)
            for piece, form in zip(arrived.split(sizes), arriving, strict=True)
        ],
    )


def arriving_forms(group: Group, tensors: Sequence[Tensor]) -> list[Form]:
    """What each rank has for this one."""
    if len(tensors) != group.size:
        raise UsageError(
            f"all_to_all: {len(tensors)} tensors for {group.size} ranks: give one for each"
        )
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise UsageError("all_to_all: the tensors have different dtypes")
    everyone = exchange(group, [Form.of(tensor) for tensor in tensors], "all_to_all")
    return [theirs[group.rank] for theirs in everyone]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
