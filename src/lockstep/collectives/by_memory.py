"""Collectives through shared memory, made to mean the same as the backend's: pieces of different
lengths, any dtype, any strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.collectives.forms import Form, check_alike, exchange, from_bytes, padded, room_for
from lockstep.collectives.group import Group, Memory, Op, check_op
from lockstep.collectives.handle import Handle
from lockstep.errors import UsageError

KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
"""What shared memory does."""


def memory_of(group: Group) -> Memory:
    """Raises UsageError where the group has none."""
    if group.memory is None:
        raise UsageError(
            "algorithm='shared_memory' needs all ranks on the CPU of one x86 Linux host, and more"
            " than one of them: use auto"
        )
    return group.memory


def all_reduce(group: Group, tensor: Tensor, op: Op) -> Handle[Tensor]:
    return Handle([memory_of(group).all_reduce(tensor, op)], lambda: tensor)


def broadcast(group: Group, tensor: Tensor, root: int) -> Handle[Tensor]:
    return Handle([memory_of(group).broadcast(tensor, root)], lambda: tensor)


def all_gather(group: Group, tensor: Tensor) -> Handle[list[Tensor]]:
    """Every rank's tensor, by rank; dim 0 may have another length on each."""
    (forms,) = zip(*exchange(group, [Form.of(tensor)], "all_gather"), strict=True)
    check_alike("all_gather", forms, group)
    room = room_for(forms)
    everyone = [torch.empty(room, dtype=torch.uint8) for _ in forms]
    work = memory_of(group).all_gather(everyone, padded(tensor, room))
    return Handle(
        [work],
        lambda: [from_bytes(octets, form) for octets, form in zip(everyone, forms, strict=True)],
    )


def reduce_scatter(group: Group, tensor: Tensor, op: Op) -> Handle[Tensor]:
    """This rank's part of the sum over all ranks: rows cut as `torch.tensor_split` cuts them,
    the first parts one longer.
    """
    check_op(op, tensor)
    if tensor.dim() == 0:
        raise UsageError("reduce_scatter cuts rows, and a 0-d tensor has none: use all_reduce")
    parts = list(tensor.detach().tensor_split(group.size))
    rows = parts[0].shape[0]
    for rank, part in enumerate(parts):
        if part.shape[0] < rows:  # of one shape for all
            parts[rank] = torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
    mine = torch.empty_like(parts[group.rank], memory_format=torch.contiguous_format)
    work = memory_of(group).reduce_scatter(mine, parts, op)
    return Handle(
        [work],
        lambda: mine[: tensor.shape[0] // group.size + (group.rank < tensor.shape[0] % group.size)],
    )
