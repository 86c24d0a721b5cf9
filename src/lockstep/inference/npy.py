"""Predictions as one .npy file: every rank writes its rows at their places as soon as it has them, and holds none of them.

Where a row lies follows from its number alone, so nobody waits for anybody. Rank 0 makes the file and puts a token in it; a rank that
does not find the token has another file system, holds its own rows until the end, and sends them to rank 0 batch by batch.
"""

from __future__ import annotations

import io
import os
import secrets
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import LockstepWarning, PeerFailed, UsageError
from lockstep.inference.columns import Column, Layout
from lockstep.inference.exchange import from_all, from_first
from lockstep.inference.out_file import Unfinished
from lockstep.inference.rows import Piece, Rows
from lockstep.world import World

_HALF = ("bfloat16",)  # numpy has no such type


class Npy:
    """One tensor's rows. bfloat16 becomes float32, which is said."""

    def __init__(self, path: Path, rows: Rows, world: World) -> None:
        self._rows, self._world = rows, world
        self._unfinished = Unfinished(path)
        self._held: dict[int, Tensor] = {}
        self._file = self._open()
        self._apart = self._file is None

    def put(self, piece: Piece, layout: Layout, tensors: list[Tensor]) -> None:
        plain = as_numpy(_only(layout), tensors[0])
        if self._apart:
            self._held[piece.number] = torch.from_numpy(plain)
        else:
            self._write(piece.rows.start, plain, header(layout, self._rows.total))

    def finish(self, layout: Layout) -> Path:
        start = header(layout, self._rows.total)
        if self._world.rank > 0:
            self._close()  # before rank 0 is told: a network file system shows others what a closed file holds
        apart = [rank for rank, flag in enumerate(from_all(b"x" if self._apart else b"", self._world)) if flag]
        for rank in apart:
            self._send(rank, _only(layout), start)
        said = ""
        if self._world.rank == 0:
            said = self._complete(start, layout)
        if from_first(said, self._world):
            raise PeerFailed(f"rank 0 could not finish {self._unfinished.final}") if self._world.rank else UsageError(said)
        return self._unfinished.final

    def discard(self) -> None:
        self._close()
        if self._world.rank == 0:
            self._unfinished.remove()

    def _close(self) -> None:
        if self._file is not None:
            handle, self._file = self._file, None
            os.close(handle)

    def _open(self) -> int | None:
        """The file, on all ranks that see the one that rank 0 made. A collective."""
        token, path = secrets.token_hex(16), self._unfinished.path
        failure = None
        if self._world.rank == 0:
            try:
                self._unfinished.create()
                path.write_text(token)
            except (UsageError, OSError) as error:
                failure = error
        token = from_first("" if failure else token, self._world)
        if not token:
            raise failure or PeerFailed(f"rank 0 could not write {self._unfinished.final}")
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            return None
        if os.pread(handle, len(token), 0) == token.encode():
            return handle
        os.close(handle)
        return None

    def _write(self, row: int, plain: NDArray[Any], start: bytes) -> None:
        assert self._file is not None
        data, place = np.ascontiguousarray(plain).reshape(-1).view(np.uint8).data, 0
        try:
            while place < len(data):
                place += os.pwrite(self._file, data[place:], len(start) + row * plain[0].nbytes + place)
        except OSError as error:
            raise self._unfinished.failed(error) from None

    def _send(self, rank: int, column: Column, start: bytes) -> None:
        """The rows that `rank` holds, to rank 0."""
        if self._world.rank not in (0, rank):
            return
        dtype = torch.from_numpy(as_numpy(column, torch.empty(0, *column.shape, dtype=column.torch_dtype))).dtype
        size = self._rows.size
        for number in range(rank, self._rows.count, self._world.size):
            rows = min(size, self._rows.total - number * size)
            if self._world.rank == rank:
                self._world.control.send(self._held.pop(number).view(-1).view(torch.uint8), 0)
            else:
                part = torch.empty(rows, *column.shape, dtype=dtype)
                self._world.control.receive(part.view(-1).view(torch.uint8), rank)
                self._write(number * size, part.numpy(), start)

    def _complete(self, start: bytes, layout: Layout) -> str:
        """Header, disk, name; the reason if it failed."""
        assert self._file is not None
        try:
            os.pwrite(self._file, start, 0)
            self._close()
            self._unfinished.keep()
        except OSError as error:
            return str(self._unfinished.failed(error))
        said_once(layout)
        return ""


def header(layout: Layout, total: int) -> bytes:
    """The file's beginning, which every rank can compute alone."""
    column = _only(layout)
    plain = as_numpy(column, torch.empty(0, *column.shape, dtype=column.torch_dtype))
    text = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(plain.dtype), "fortran_order": False, "shape": (total, *column.shape)}
    np.lib.format.write_array_header_1_0(text, fields)
    return text.getvalue()


def as_numpy(column: Column, tensor: Tensor) -> NDArray[Any]:
    """A column's rows. Raises UsageError for a dtype that numpy does not have."""
    try:
        return (tensor.float() if column.dtype in _HALF else tensor).resolve_conj().resolve_neg().numpy()
    except TypeError:
        raise UsageError(f"predictions of dtype {column.dtype} ({column.name!r}) cannot be written: return .float() in the model") from None


def said_once(layout: Layout) -> None:
    """Say where a file's numbers have another type than the model's."""
    half = [column.name for column in layout.columns if column.dtype in _HALF]
    if half:
        warnings.warn(
            f"{', '.join(map(repr, half))} is bfloat16, which the file does not have: written as float32", LockstepWarning, stacklevel=2
        )


def _only(layout: Layout) -> Column:
    if layout.container != "tensor":
        raise UsageError(
            f"the model returned {layout}: a .npy file holds one tensor; write .parquet, or wrap the model in one that returns one"
        )
    return layout.columns[0]
