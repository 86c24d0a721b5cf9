"""Slices to their owners, and messages to everybody: how a compressed bucket gets to the other ranks.

    rank 0   [ a0 | a1 | a2 ]        slice r of everybody's bucket goes to rank r (all-to-all), which unpacks it, adds it up
    rank 1   [ b0 | b1 | b2 ]   ->   in the order of ranks and packs the sum once; then every rank gets every sum (all-gather)
    rank 2   [ c0 | c1 | c2 ]

A backend would add packed numbers as they are: bfloat16 in bfloat16, and int8 not at all. Here an owner adds in float32, and a sum is
rounded twice however many ranks there are. It has one owner, so all ranks have the same bits of it. The bytes are a ring's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.collectives.group import Done, Group, Work


def sliced(flat: Tensor, size: int, multiple: int = 1) -> Tensor:
    """One row for every rank, [size, length], with zeros behind the end; `length` is a multiple of `multiple`."""
    length = -(-flat.numel() // (size * multiple)) * multiple
    if flat.numel() == size * length:
        return flat.view(size, length)
    rows = flat.new_zeros(size * length)
    rows[: flat.numel()].copy_(flat)
    return rows.view(size, length)


def to_owners(group: Group, rows: Tensor, place: str) -> tuple[Tensor, Work]:
    """Start to send row r to rank r: what every rank has for this one, by rank, in the same shape, once the work is done."""
    if group.size == 1:
        return rows, Done()
    rows = rows.contiguous()
    arriving, each = torch.empty_like(rows), [rows.shape[1]] * group.size
    return arriving, group.exchange(arriving.view(-1), each, rows.view(-1), each, place)


def to_all(group: Group, message: Tensor, place: str) -> tuple[Tensor, Work]:
    """Start to send a flat message to every rank: everybody's, by rank, [size, length], once the work is done.

    An all-gather that leaves while the backward goes on.
    """
    return to_owners(group, message.expand(group.size, -1), place)


def added(rows: Tensor) -> Tensor:
    """The sum of rows, in their order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
