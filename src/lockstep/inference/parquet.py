"""Predictions as one Parquet file: rank 0 writes row groups in the order of the data set, and the others send it their rows.

Nothing is sent while the model runs: each rank holds its own rows until the end, and rank 0 takes them batch by batch. A row group ends
where its rows reach a size, so that the file has the same bytes at every world size.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import PeerFailed, UsageError
from lockstep.inference.columns import Column, Layout
from lockstep.inference.exchange import from_first
from lockstep.inference.npy import as_numpy, said_once
from lockstep.inference.out_file import Unfinished
from lockstep.inference.rows import Piece, Rows
from lockstep.world import World

_GROUP_BYTES = 4 * 2**20


class Parquet:
    """Columns by name; a row of several numbers is a list of fixed size. bfloat16 becomes float32, which is said."""

    def __init__(self, path: Path, rows: Rows, world: World) -> None:
        self._rows, self._world = rows, world
        self._unfinished = Unfinished(path)
        self._held: dict[int, list[Tensor]] = {}
        self._next = 0  # batch that rank 0 writes next
        self._waiting: list[Any] = []  # tables of the row group
        self._writer: Any = None
        failure = None
        if world.rank == 0:
            try:
                _arrow()  # now, so that the memory that it takes is not missed when the rows are there
                self._unfinished.create()
            except UsageError as error:
                failure = error
        if from_first("failed" if failure else "", world):
            raise failure or PeerFailed(f"rank 0 could not write {path}")

    def put(self, piece: Piece, layout: Layout, tensors: list[Tensor]) -> None:
        if self._world.rank == 0 and piece.number == self._next:
            self._write(layout, tensors)
        else:
            self._held[piece.number] = tensors

    def finish(self, layout: Layout) -> Path:
        size, world = self._rows.size, self._world
        for number in range(self._next if world.rank == 0 else world.rank, self._rows.count, 1 if world.rank == 0 else world.size):
            owner = number % world.size
            if world.rank > 0:
                for tensor in self._held.pop(number):
                    world.control.send(_bytes(tensor), 0)
                continue
            if owner == 0:
                tensors = self._held.pop(number)
            else:
                rows = min(size, self._rows.total - number * size)
                tensors = [torch.empty(rows, *column.shape, dtype=column.torch_dtype) for column in layout.columns]
                for tensor in tensors:
                    world.control.receive(_bytes(tensor), owner)
            self._write(layout, tensors)
        said = self._complete(layout) if world.rank == 0 else ""
        if from_first(said, world):
            raise PeerFailed(f"rank 0 could not finish {self._unfinished.final}") if world.rank else UsageError(said)
        return self._unfinished.final

    def discard(self) -> None:
        if self._world.rank == 0:
            if self._writer is not None:
                self._writer.close()
            self._unfinished.remove()

    def _write(self, layout: Layout, tensors: list[Tensor]) -> None:
        arrays = [_array(column, as_numpy(column, tensor)) for column, tensor in zip(layout.columns, tensors, strict=True)]
        self._waiting.append(_arrow().table(arrays, names=[column.name for column in layout.columns]))
        self._next += 1
        if sum(table.nbytes for table in self._waiting) >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            table = _arrow().concat_tables(self._waiting).combine_chunks()
            self._waiting = []
            try:
                if self._writer is None:
                    self._writer = import_module("pyarrow.parquet").ParquetWriter(self._unfinished.path, table.schema, use_dictionary=False)
                self._writer.write_table(table, row_group_size=len(table))
            except OSError as error:
                raise self._unfinished.failed(error) from None

    def _complete(self, layout: Layout) -> str:
        """The rest, disk, name; the reason if it failed."""
        try:
            self._flush()
            self._writer.close()
            self._unfinished.keep()
        except UsageError as error:
            return str(error)
        except OSError as error:
            return str(self._unfinished.failed(error))
        said_once(layout)
        return ""


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _arrow() -> Any:
    return import_module("pyarrow")


def _array(column: Column, plain: NDArray[Any]) -> Any:
    pa = _arrow()
    if 0 in column.shape:
        raise UsageError(f"{column.name!r} has no numbers in a row (shape {list(column.shape)}): Parquet cannot hold it; write .npy")
    try:
        found = pa.array(plain.reshape(-1))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        raise UsageError(f"{column.name!r} is {column.dtype}, which Parquet does not have: write .npy, or return real numbers") from None
    for size in reversed(column.shape):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found
