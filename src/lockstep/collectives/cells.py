"""Where the cells of a schedule lie in memory, for those who run one.

A tensor that is cut (all-reduce, broadcast ...) is one flat piece of memory, so that neighbouring
cells travel as one message. Pieces that are tensors of their own (scatter, gather, all-to-all) lie
where they are, and are packed to travel together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.collectives.reduce_op import COMBINE


class Cells(Protocol):
    """One rank's cells."""

    def outgoing(self, cells: Sequence[int]) -> list[Tensor]:
        """Contiguous memory with their content, to be sent as one message each."""
        ...

    def incoming(self, cells: Sequence[int]) -> list[Tensor]:
        """Memory of the same sizes, into which their content may be received."""
        ...

    def replace(self, cells: Sequence[int], arrived: Sequence[Tensor]) -> None:
        """Have what arrived (in `incoming`, or elsewhere) as their content."""
        ...

    def combine(self, cells: Sequence[int], arrived: Sequence[Tensor], op: str) -> None:
        """Reduce what arrived into their content."""
        ...


class FlatCells:
    """Cell c is the elements `edges[c] .. edges[c + 1]` of a flat tensor; what changes, changes
    there.
    """

    def __init__(self, flat: Tensor, edges: Sequence[int]) -> None:
        self._flat = flat
        self._edges = edges

    def outgoing(self, cells: Sequence[int]) -> list[Tensor]:
        first, last = cells[0], cells[-1]
        if last - first == len(cells) - 1:
            return [self._flat[self._edges[first] : self._edges[last + 1]]]
        # Past the last cell comes the first.
        return [self._flat[self._edges[first] :], self._flat[: self._edges[last + 1]]]

    incoming = outgoing

    def replace(self, cells: Sequence[int], arrived: Sequence[Tensor]) -> None:
        for mine, theirs in zip(self.outgoing(cells), arrived, strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)

    def combine(self, cells: Sequence[int], arrived: Sequence[Tensor], op: str) -> None:
        for mine, theirs in zip(self.outgoing(cells), arrived, strict=True):
            COMBINE[op](mine, theirs, out=mine)


class LooseCells:
    """Cell c is the flat tensor `held[c]` of `sizes[c]` elements; a rank has memory only for
    those that pass through it.
    """

    def __init__(self, held: dict[int, Tensor], sizes: Sequence[int], like: Tensor) -> None:
        self.held = held
        self._sizes = sizes
        self.like = like

    def outgoing(self, cells: Sequence[int]) -> list[Tensor]:
        return [
            (
                self.held[cells[0]]
                if len(cells) == 1
                else torch.cat([self.held[cell] for cell in cells])
            )
        ]

    def incoming(self, cells: Sequence[int]) -> list[Tensor]:
        return [self.like.new_empty(sum(self._sizes[cell] for cell in cells))]

    def replace(self, cells: Sequence[int], arrived: Sequence[Tensor]) -> None:
        self.held.update(
            zip(cells, arrived[0].split([self._sizes[cell] for cell in cells]), strict=True)
        )

    def combine(self, cells: Sequence[int], arrived: Sequence[Tensor], op: str) -> None:
        raise AssertionError("pieces that are tensors of their own are moved, never reduced")


def edges_of(sizes: Sequence[int]) -> list[int]:
    """Where each cell begins, and the end."""
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return edges
