"""The memory of the cells of a schedule.

A tensor that is cut (all-reduce, broadcast ...) is one flat piece of memory, so neighbouring cells
travel as one message. Cells that are separate tensors (scatter, gather, all-to-all) stay where they
are, and are packed into one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.collectives.reduce_op import COMBINE, working_dtype
from lockstep.schedules.schedule import spans


@dataclass(frozen=True, slots=True, eq=False)
class FlatCells:
    """Cell c is the elements `edges[c] .. edges[c + 1]` of a flat tensor, which is changed in
    place.
    """

    flat: Tensor
    edges: Sequence[int]

    def outgoing(self, cells: Sequence[int]) -> list[Tensor]:
        """Return the cells' content as contiguous tensors. Each is sent as one message."""
        first = cells[0]
        last = cells[-1]
        start = self.edges[first]
        stop = self.edges[last + 1]
        if last - first == len(cells) - 1:
            return [self.flat[start:stop]]
        # The cells wrap around: after the last comes the first.
        return [self.flat[start:], self.flat[:stop]]

    @classmethod
    def cut(cls, flat: Tensor, cells: int) -> FlatCells:
        """Cut a flat tensor into cells of about equal size."""
        starts = [start for start, _ in spans(flat.numel(), cells)]
        return cls(flat, [*starts, flat.numel()])

    incoming = outgoing
    """Returns tensors of the same sizes, into which the content may be received."""

    def replace(self, cells: Sequence[int], arrived: Sequence[Tensor]) -> None:
        """Replace the cells' content by what arrived (in `incoming`, or elsewhere)."""
        for local, remote in zip(self.outgoing(cells), arrived, strict=True):
            if local.data_ptr() != remote.data_ptr():
                local.copy_(remote)

    def combine(self, cells: Sequence[int], arrived: Sequence[Tensor], op: str) -> None:
        """Reduce what arrived into the cells' content."""
        for local, remote in zip(self.outgoing(cells), arrived, strict=True):
            COMBINE[op](local, remote, out=local)


@dataclass(frozen=True, slots=True, eq=False)
class LooseCells:
    """Cell c is the flat tensor `tensors[c]` of `sizes[c]` elements. A rank holds only the cells
    that pass through it.
    """

    tensors: dict[int, Tensor]
    sizes: Sequence[int]
    like: Tensor

    def outgoing(self, cells: Sequence[int]) -> list[Tensor]:
        tensors = [self.tensors[cell] for cell in cells]
        if len(tensors) == 1:
            return tensors
        return [torch.cat(tensors)]

    def incoming(self, cells: Sequence[int]) -> list[Tensor]:
        size = sum(self.sizes[cell] for cell in cells)
        return [self.like.new_empty(size)]

    def replace(self, cells: Sequence[int], arrived: Sequence[Tensor]) -> None:
        parts = arrived[0].split([self.sizes[cell] for cell in cells])
        self.tensors.update(zip(cells, parts, strict=True))

    def combine(self, cells: Sequence[int], arrived: Sequence[Tensor], op: str) -> None:
        raise AssertionError("pieces that are tensors of their own are moved, never reduced")


Cells = FlatCells | LooseCells
"""One rank's cells."""


def cell_of(flat: Tensor, edges: Sequence[int], cell: int) -> Tensor:
    """Return the content of one cell of a flat tensor."""
    return flat[edges[cell] : edges[cell + 1]]


def working_copy(tensor: Tensor) -> Tensor:
    """Return a flat copy of a tensor, in the dtype in which it is reduced."""
    return tensor.detach().reshape(-1).to(working_dtype(tensor), copy=True)


def edges_of(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each cell, and the end of the last."""
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return edges
