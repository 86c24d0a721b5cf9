"""The memory of the cells of a schedule.

A tensor that is cut (all-reduce, broadcast ...) is one flat piece of memory, so neighbouring cells
travel as one message. Cells that are separate tensors (scatter, gather, all-to-all) stay where they
are, and are packed into one message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.collectives.reduce_op import COMBINE
from lockstep.collectives.schedule import spans


class FlatCells:
    """Cell c is the elements `edges[c] .. edges[c + 1]` of a flat tensor, which is changed in
    place.
    """

    def __init__(self, flat: Tensor, edges: Sequence[int]) -> None:
        self._flat = flat
        self._edges = edges

    def outgoing(self, cells: Sequence[int]) -> list[Tensor]:
        """Return the cells' content as contiguous tensors. Each is sent as one message."""
        first, last = cells[0], cells[-1]
        if last - first == len(cells) - 1:
            return [self._flat[self._edges[first] : self._edges[last + 1]]]
        # The cells wrap around: after the last comes the first.
        return [self._flat[self._edges[first] :], self._flat[: self._edges[last + 1]]]

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


class LooseCells:
    """Cell c is the flat tensor `tensors[c]` of `sizes[c]` elements. A rank holds only the cells
    that pass through it.
    """

    def __init__(self, tensors: dict[int, Tensor], sizes: Sequence[int], like: Tensor) -> None:
        self.tensors = tensors
        self._sizes = sizes
        self.like = like

    def outgoing(self, cells: Sequence[int]) -> list[Tensor]:
        tensors = [self.tensors[cell] for cell in cells]
        return tensors if len(tensors) == 1 else [torch.cat(tensors)]

    def incoming(self, cells: Sequence[int]) -> list[Tensor]:
        return [self.like.new_empty(sum(self._sizes[cell] for cell in cells))]

    def replace(self, cells: Sequence[int], arrived: Sequence[Tensor]) -> None:
        parts = arrived[0].split([self._sizes[cell] for cell in cells])
        self.tensors.update(zip(cells, parts, strict=True))

    def combine(self, cells: Sequence[int], arrived: Sequence[Tensor], op: str) -> None:
        raise AssertionError("pieces that are tensors of their own are moved, never reduced")


Cells = FlatCells | LooseCells
"""One rank's cells."""


def edges_of(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each cell, and the end of the last."""
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return edges
