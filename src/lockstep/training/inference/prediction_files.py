"""Predictions as one file, .npy or .parquet. A model's output for a batch becomes named columns
with one row per sample, whatever its container. Rank 0 creates the file and gives it its final
name. Rows are written as early as possible.

    .npy        the position of a row follows from its number alone: every rank that sees the file
                writes its own rows, and holds none of them
    .parquet    rank 0 writes row groups in the order of the data set; a group ends when its rows
                reach a size, so the file has the same bytes at every world size

A rank that cannot write its rows holds them until the end, and then sends them to rank 0 batch by
batch.
"""

from __future__ import annotations

import io
import os
import secrets
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.collectives.broadcast_json import everybodys, said_by
from lockstep.data.rows import Piece, Rows
from lockstep.errors import LockstepError, LockstepWarning, PeerFailed, UsageError
from lockstep.runtime.disk import force
from lockstep.training.metrics import typed
from lockstep.world.world import World


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    dtype: str
    """torch's name of the dtype, such as "float32"."""
    shape: tuple[int, ...]
    """Shape of one row."""

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def row_bytes(self) -> int:
        return self.torch_dtype.itemsize * torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The columns of every batch, and the container that the model put them in: "tensor",
    "tuple", "list" or "dict".
    """

    container: str
    columns: tuple[Column, ...]

    def joined(self, tensors: Sequence[Tensor]) -> Any:
        """Return the columns in the model's container."""
        if self.container == "tensor":
            return tensors[0]
        if self.container == "dict":
            return {
                column.name: tensor for column, tensor in zip(self.columns, tensors, strict=True)
            }
        return list(tensors) if self.container == "list" else tuple(tensors)

    def __str__(self) -> str:
        return f"a {self.container} ({', '.join(map(str, self.columns))})"


def split(output: Any, piece: Piece) -> tuple[RowLayout, list[Tensor]]:
    """Return the columns of one batch's output, on the CPU, in memory of their own. Raises
    UsageError if there is not one row per sample.
    """
    container, parts = _parts(output)
    for name, part in parts.items():
        if not isinstance(part, Tensor):
            raise UsageError(
                "wrong-return-type",
                function=f"the model, as {name!r},",
                type=type(part).__name__,
                expected="a tensor, or a tuple, list or dict of tensors",
            )
        if part.dim() == 0 or len(part) != len(piece.rows):
            rows = "no rows (a 0-d tensor)" if part.dim() == 0 else f"{len(part)} rows"
            raise UsageError(
                "rows-are-not-samples",
                column=name,
                rows=rows,
                samples=len(piece.rows),
                start=piece.rows.start,
                last=piece.rows.stop - 1,
            )
    columns = [
        Column(name, str(part.dtype).removeprefix("torch."), tuple(part.shape[1:]))
        for name, part in parts.items()
    ]
    return RowLayout(container, tuple(columns)), [_own(part) for part in parts.values()]


def _parts(output: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(output, Mapping):
        return "dict", {str(name): part for name, part in output.items()}
    if isinstance(output, (tuple, list)):
        return "list" if isinstance(output, list) else "tuple", {
            f"prediction_{number}": part for number, part in enumerate(output)
        }
    return "tensor", {"prediction": output}


def _own(part: Tensor) -> Tensor:
    plain = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.clone() if plain.untyped_storage().nbytes() > plain.nbytes else plain


def same(first: RowLayout, other: RowLayout, where: str, of_first: str) -> None:
    """Raise UsageError if two batches gave different columns."""
    if first != other:
        raise UsageError(
            "columns-differ", columns=str(other), where=where, first=str(first), of_first=of_first
        )


def agreed(mine: RowLayout | None, total: int, world: World) -> RowLayout:
    """Return the layout of all ranks' batches, also on a rank that had none. A collective; raises
    UsageError on all ranks if layouts differ.
    """
    found = everybodys(
        [total, None if mine is None else asdict(mine)],
        world.control,
        "for the columns of predictions",
    )
    for rank, (rows, _) in enumerate(found):
        if rows != found[0][0]:
            raise UsageError("ranks-given-other-data", rank=rank, rows=rows, first=found[0][0])
    first: RowLayout = typed(RowLayout, found[0][1])  # rank 0 has the first batch
    for rank, (_, layout) in enumerate(found):
        other = first if layout is None else typed(RowLayout, layout)
        same(first, other, f"the batches of rank {rank}", "those of rank 0")
    return first


_HALF = ("bfloat16",)  # numpy has no such type
_GROUP_BYTES = 4 * 2**20
_PLACE = "for the file of predictions"


class Unfinished:
    """FILE.part, which becomes FILE when it is complete."""

    def __init__(self, path: Path) -> None:
        self.final = path
        self.path = path.with_name(path.name + ".part")

    def create(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
        except OSError as error:
            raise self.failed(error) from None

    def keep(self) -> None:
        """Force the file to disk, and give it its final name."""
        force(self.path)
        self.path.replace(self.final)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def failed(self, error: OSError) -> LockstepError:
        return UsageError(
            "cannot-write", name="predictions", file=str(self.final), reason=str(error.strerror)
        )


class PredictionFile(ABC):
    """A file of predictions. Every rank makes it, puts its batches, and finishes or discards it.
    bfloat16 is written as float32, with a warning.
    """

    def __init__(self, path: Path, rows: Rows, world: World) -> None:
        self._rows, self._world = rows, world
        self._unfinished = Unfinished(path)
        self._held: dict[int, list[Tensor]] = {}
        failure = None
        if world.rank == 0:
            try:
                self._create()
            except (UsageError, OSError) as error:
                failure = error
        if said_by(0, failure is not None, world.control, _PLACE):
            raise failure or PeerFailed("rank-0-failed", what=f"write {path}")

    def finish(self, layout: RowLayout) -> Path:
        self._collect(layout, self._apart())
        said = self._complete(layout) if self._world.rank == 0 else ""
        if said_by(0, said, self._world.control, _PLACE):
            raise (
                PeerFailed("rank-0-failed", what=f"finish {self._unfinished.final}")
                if self._world.rank
                else UsageError(said)
            )
        return self._unfinished.final

    def discard(self) -> None:
        self._close()
        if self._world.rank == 0:
            self._unfinished.remove()

    def _collect(self, layout: RowLayout, apart: Collection[int]) -> None:
        """Send what the ranks in `apart` hold to rank 0, which writes it to the file in order."""
        rank, control, size = self._world.rank, self._world.control, self._rows.size
        for number in range(self._rows.count):
            owner = number % self._world.size
            if owner not in apart or rank not in (0, owner):
                continue
            if rank == owner:
                tensors = self._held.pop(number, [])  # rank 0 may have written it
            else:
                rows = min(size, self._rows.total - number * size)
                tensors = [
                    torch.empty(rows, *column.shape, dtype=column.torch_dtype)
                    for column in layout.columns
                ]
            for tensor in tensors:
                if rank:
                    control.send(_octets(tensor), 0)
                elif owner:
                    control.receive(_octets(tensor), owner)
            if rank == 0 and tensors:
                self._write(number, layout, tensors)

    def _complete(self, layout: RowLayout) -> str:
        """On rank 0: write the rest, force it to disk, rename it. Return the reason if it fails."""
        try:
            self._end(layout)
            self._close()
            self._unfinished.keep()
        except UsageError as error:
            return str(error)
        except OSError as error:
            return str(self._unfinished.failed(error))
        half = [column.name for column in layout.columns if column.dtype in _HALF]
        if half:
            said = (
                f"{', '.join(map(repr, half))} is bfloat16, which the file format does not"
                " support: written as float32"
            )
            warnings.warn(said, LockstepWarning, stacklevel=2)
        return ""

    @abstractmethod
    def put(self, piece: Piece, layout: RowLayout, tensors: list[Tensor]) -> None:
        """Take a batch of this rank."""

    @abstractmethod
    def _create(self) -> None:
        """Create the file, on rank 0."""

    @abstractmethod
    def _apart(self) -> Collection[int]:
        """Return the ranks that may hold rows. A collective."""

    @abstractmethod
    def _write(self, number: int, layout: RowLayout, tensors: list[Tensor]) -> None: ...

    @abstractmethod
    def _end(self, layout: RowLayout) -> None:
        """Complete the file after all rows."""

    @abstractmethod
    def _close(self) -> None: ...


class Npy(PredictionFile):
    """One tensor's rows. Rank 0 writes a token into the file; a rank that does not find it there
    has another file system.
    """

    def __init__(self, path: Path, rows: Rows, world: World) -> None:
        self._token = secrets.token_hex(16)
        self._file: int | None = None
        super().__init__(path, rows, world)
        self._token = said_by(0, self._token, world.control, _PLACE)
        self._file = self._open()
        self._is_apart = self._file is None

    def _create(self) -> None:
        self._unfinished.create()
        self._unfinished.path.write_text(self._token)

    def _open(self) -> int | None:
        try:
            handle = os.open(self._unfinished.path, os.O_RDWR)
        except OSError:
            return None
        if os.pread(handle, len(self._token), 0) == self._token.encode():
            return handle
        os.close(handle)
        return None

    def put(self, piece: Piece, layout: RowLayout, tensors: list[Tensor]) -> None:
        if self._is_apart:
            as_numpy(_only(layout), tensors[0])  # raises now if the file cannot hold it
            self._held[piece.number] = tensors
        else:
            self._write(piece.number, layout, tensors)

    def _write(self, number: int, layout: RowLayout, tensors: list[Tensor]) -> None:
        assert self._file is not None
        plain = as_numpy(_only(layout), tensors[0])
        start = len(header(layout, self._rows.total)) + number * self._rows.size * plain[0].nbytes
        data, place = np.ascontiguousarray(plain).reshape(-1).view(np.uint8).data, 0
        try:
            while place < len(data):
                place += os.pwrite(self._file, data[place:], start + place)
        except OSError as error:
            raise self._unfinished.failed(error) from None

    def _apart(self) -> Collection[int]:
        if self._world.rank > 0:
            # before rank 0 is told: on a network file system others see what a closed file holds
            self._close()
        return [
            rank
            for rank, apart in enumerate(everybodys(self._is_apart, self._world.control, _PLACE))
            if apart
        ]

    def _end(self, layout: RowLayout) -> None:
        assert self._file is not None
        os.pwrite(self._file, header(layout, self._rows.total), 0)

    def _close(self) -> None:
        if self._file is not None:
            handle, self._file = self._file, None
            os.close(handle)


class Parquet(PredictionFile):
    """Columns by name; a row of several numbers is a list of fixed size."""

    def __init__(self, path: Path, rows: Rows, world: World) -> None:
        self._next = 0  # batch that rank 0 writes next
        self._waiting: list[Any] = []  # tables of the next row group
        self._writer: Any = None
        super().__init__(path, rows, world)

    def _create(self) -> None:
        _arrow()  # imported before there are rows, because it takes memory
        self._unfinished.create()

    def put(self, piece: Piece, layout: RowLayout, tensors: list[Tensor]) -> None:
        if self._world.rank == 0 and piece.number == self._next:
            self._write(piece.number, layout, tensors)
        else:
            self._held[piece.number] = tensors

    def _apart(self) -> Collection[int]:
        return range(self._world.size)

    def _write(self, number: int, layout: RowLayout, tensors: list[Tensor]) -> None:
        arrays = [
            _array(column, as_numpy(column, tensor))
            for column, tensor in zip(layout.columns, tensors, strict=True)
        ]
        self._waiting.append(
            _arrow().table(arrays, names=[column.name for column in layout.columns])
        )
        self._next = number + 1
        if sum(table.nbytes for table in self._waiting) >= _GROUP_BYTES:
            self._end(layout)

    def _end(self, layout: RowLayout) -> None:
        if self._waiting:
            table = _arrow().concat_tables(self._waiting).combine_chunks()
            self._waiting = []
            try:
                if self._writer is None:
                    self._writer = import_module("pyarrow.parquet").ParquetWriter(
                        self._unfinished.path, table.schema, use_dictionary=False
                    )
                self._writer.write_table(table, row_group_size=len(table))
            except OSError as error:
                raise self._unfinished.failed(error) from None

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def header(layout: RowLayout, total: int) -> bytes:
    """Return the beginning of a .npy file, which every rank can compute alone."""
    column = _only(layout)
    plain = as_numpy(column, torch.empty(0, *column.shape, dtype=column.torch_dtype))
    text = io.BytesIO()
    fields = {
        "descr": np.lib.format.dtype_to_descr(plain.dtype),
        "fortran_order": False,
        "shape": (total, *column.shape),
    }
    np.lib.format.write_array_header_1_0(text, fields)
    return text.getvalue()


def as_numpy(column: Column, tensor: Tensor) -> NDArray[Any]:
    """Return a column's rows as an array. Raises UsageError for a dtype that numpy lacks."""
    try:
        return (tensor.float() if column.dtype in _HALF else tensor).numpy()
    except TypeError:
        raise _not_writable(column, "return .float() in the model") from None


def _not_writable(column: Column, instead: str) -> UsageError:
    return UsageError("column-not-writable", column=column.name, kind=str(column), instead=instead)


def _octets(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _only(layout: RowLayout) -> Column:
    if layout.container != "tensor":
        raise UsageError("npy-holds-one-tensor", layout=str(layout))
    return layout.columns[0]


def _arrow() -> Any:
    return import_module("pyarrow")


def _array(column: Column, plain: NDArray[Any]) -> Any:
    pa = _arrow()
    if 0 in column.shape:
        raise _not_writable(column, "write .npy")
    try:
        found = pa.array(plain.reshape(-1))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        raise _not_writable(column, "write .npy, or return real numbers") from None
    for size in reversed(column.shape):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found
