"""Where predictions go, batch by batch; and the meeting of the ranks at the end, when each of them must learn what it could not see."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.inference.columns import Layout, same
from lockstep.inference.exchange import from_all
from lockstep.inference.rows import Piece
from lockstep.world import World

_AT_ONCE = 2**21  # numbers of 8 bytes that are summed together


class Sink(Protocol):
    """`put` every batch of this rank, then `finish` on all ranks; `discard` instead after an error."""

    def put(self, piece: Piece, layout: Layout, tensors: list[Tensor]) -> None: ...

    def finish(self, layout: Layout) -> Any:
        """All rows, or where they are. A collective."""
        ...

    def discard(self) -> None: ...


def agreed(mine: Layout | None, total: int, world: World) -> Layout:
    """The layout of all ranks' batches, also on a rank that had none. A collective; raises UsageError on all ranks where they differ."""
    packed = json.dumps([total, None if mine is None else mine.as_text()]).encode()
    found = [json.loads(each) for each in from_all(packed, world)]
    for rank, (rows, _) in enumerate(found):
        if rows != found[0][0]:
            raise UsageError(f"rank {rank} was given {rows} rows and rank 0 {found[0][0]}: give all ranks the same data")
    first = Layout.from_text(found[0][1])  # rank 0 has the first batch
    for rank, (_, text) in enumerate(found):
        if text is not None:
            same(first, Layout.from_text(text), f"the batches of rank {rank}", "those of rank 0")
    return first


class Memory:
    """All rows on every rank, on the CPU. A rank writes its own in their places and the rest is added: bytes to zeros, so exactly."""

    def __init__(self, total: int, world: World) -> None:
        self._total, self._world = total, world
        self._numbers: list[Tensor] = []
        self._columns: list[Tensor] = []

    def put(self, piece: Piece, layout: Layout, tensors: list[Tensor]) -> None:
        self._make(layout)
        for column, tensor in zip(self._columns, tensors, strict=True):
            column[piece.rows.start : piece.rows.stop] = tensor

    def finish(self, layout: Layout) -> Any:
        self._make(layout)
        for numbers in self._numbers:
            for part in numbers.split(_AT_ONCE):
                self._world.control.all_reduce(part).wait()
        return layout.joined(self._columns)

    def discard(self) -> None:
        self._numbers, self._columns = [], []

    def _make(self, layout: Layout) -> None:
        if self._columns:
            return
        for column in layout.columns:
            size = self._total * column.row_bytes
            numbers = torch.zeros(-(-size // 8), dtype=torch.int64)
            self._numbers.append(numbers)
            self._columns.append(numbers.view(torch.uint8)[:size].view(column.torch_dtype).reshape(self._total, *column.shape))
