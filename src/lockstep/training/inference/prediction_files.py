"""Predictions as one .npy file. A model's output for a batch becomes named columns with one row per
sample, whatever its container; the file holds one column.

The position of a row follows from its number alone, so every rank writes its own rows as they come,
and holds none of them. No rank needs more than numpy. Rank 0 creates the file and gives it its final
name. All ranks must see it.
"""

from __future__ import annotations

import io
import math
import secrets
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.collectives.broadcast_json import everybodys, said_by
from lockstep.data.evaluation_batches import Piece, Rows
from lockstep.errors import LockstepWarning, UsageError
from lockstep.runtime.disk import force, write_all
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
    def torch_dtype(self) -> Any:
        return getattr(torch, self.dtype)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape, start=self.torch_dtype.itemsize)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The columns of every batch, and the container that the model put them in: "tensor",
    "tuple", "list" or "dict".
    """

    container: str
    columns: tuple[Column, ...]

    def joined(self, tensors: list[Tensor]) -> Any:
        """Return the columns in the model's container."""
        if self.container == "tensor":
            return tensors[0]
        if self.container == "dict":
            names = [column.name for column in self.columns]
            return dict(zip(names, tensors, strict=True))
        return tensors if self.container == "list" else tuple(tensors)

    def __str__(self) -> str:
        return f"a {self.container} ({', '.join(map(str, self.columns))})"


def split(output: Any, piece: Piece) -> tuple[RowLayout, list[Tensor]]:
    """Return the columns of one batch's output, on the CPU, in memory of their own. Raises
    UsageError if there is not one row per sample.
    """
    container, parts = _parts(output)
    columns = []
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
        dtype = str(part.dtype).removeprefix("torch.")
        columns.append(Column(name, dtype, tuple(part.shape[1:])))
    return RowLayout(container, tuple(columns)), list(map(_own, parts.values()))


def _parts(output: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(output, Mapping):
        return "dict", {str(name): part for name, part in output.items()}
    if isinstance(output, (tuple, list)):
        container = "list" if isinstance(output, list) else "tuple"
        return container, {f"prediction_{number}": part for number, part in enumerate(output)}
    return "tensor", {"prediction": output}


def _own(part: Tensor) -> Tensor:
    plain = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.clone() if plain.untyped_storage().nbytes() > plain.nbytes else plain


def same(first: RowLayout, other: RowLayout, of_other: str, of_first: str) -> None:
    """Raise UsageError if two batches gave different columns."""
    if first != other:
        raise UsageError(
            "columns-differ",
            columns=str(other),
            where=of_other,
            first=str(first),
            of_first=of_first,
        )


def agreed(layout: RowLayout | None, total: int, world: World) -> RowLayout:
    """Return the layout of all ranks' batches, also on a rank that had none. A collective; raises
    UsageError on all ranks if layouts differ.
    """
    own = [total, None if layout is None else asdict(layout)]
    by_rank = everybodys(own, world.control, "for the columns of predictions")
    first_total = by_rank[0][0]
    first: RowLayout = typed(RowLayout, by_rank[0][1])  # rank 0 has the first batch
    for rank, (rows, fields) in enumerate(by_rank):
        if rows != first_total:
            raise UsageError("ranks-given-other-data", rank=rank, rows=rows, first=first_total)
        if fields is not None:
            other = typed(RowLayout, fields)
            same(first, other, f"the batches of rank {rank}", "those of rank 0")
    return first


_CALL_SITE = "for the file of predictions"


class NpyFile:
    """FILE.part, which becomes FILE when it is complete. Every rank opens it, puts its batches, and
    finishes or discards it. bfloat16, which numpy lacks, is written as float32, with a warning.
    """

    def __init__(self, path: Path, rows: Rows, world: World) -> None:
        """Raises UsageError on all ranks if rank 0 cannot create the file, or a rank cannot open
        it. Rank 0 writes a token into it: a rank that does not read it there sees another file.
        """
        self._final, self._part = path, path.with_name(path.name + ".part")
        self._rows, self._world = rows, world
        self._header = b""
        token = said_by(0, secrets.token_hex(16), world.control, _CALL_SITE)
        self._on_rank_0(lambda: self._create(token))
        shared = False
        with suppress(OSError), self._part.open("r+") as file:
            shared = file.read(len(token)) == token
        by_rank = everybodys(shared, world.control, _CALL_SITE)
        blind = [rank for rank, sees_it in enumerate(by_rank) if not sees_it]
        if blind:
            self._remove()
            raise UsageError("predictions-file-not-shared", file=str(path), ranks=blind)
        self._file = self._part.open("r+b", buffering=0)

    def put(self, piece: Piece, layout: RowLayout, tensors: list[Tensor]) -> None:
        """Write a batch of this rank."""
        rows = as_numpy(layout, tensors[0])
        self._header = header(rows, self._rows.total)
        start = len(self._header) + piece.rows.start * rows[0].nbytes
        try:
            self._file.seek(start)
            write_all(self._file.fileno(), rows.tobytes())
        except OSError as error:
            raise self._not_written(str(error.strerror)) from None

    def finish(self, layout: RowLayout) -> Path:
        """Complete the file after all rows, force it to disk, and rename it. A collective."""
        if self._world.rank > 0:
            self._file.close()  # on a network file system others see what a closed file holds
        everybodys(None, self._world.control, _CALL_SITE)
        self._on_rank_0(self._complete)
        if self._world.rank == 0 and layout.columns[0].dtype == "bfloat16":
            message = (
                "the predictions are bfloat16, which .npy does not support: written as float32"
            )
            warnings.warn(message, LockstepWarning, stacklevel=2)
        return self._final

    def discard(self) -> None:
        self._file.close()
        self._remove()

    def _on_rank_0(self, action: Callable[[], object]) -> None:
        """Let rank 0 do it. A collective; raises UsageError on all ranks if that fails."""
        failure = ""
        if self._world.rank == 0:
            try:
                action()
            except OSError as error:
                failure = str(error.strerror)
        failure = said_by(0, failure, self._world.control, _CALL_SITE)
        if failure:
            raise self._not_written(failure)

    def _create(self, token: str) -> None:
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._part.write_text(token)

    def _complete(self) -> None:
        """Write the header, which rank 0 has, as it has the first batch."""
        self._file.seek(0)
        write_all(self._file.fileno(), self._header)
        self._file.close()
        force(self._part)
        self._part.replace(self._final)

    def _remove(self) -> None:
        if self._world.rank == 0:
            self._part.unlink(missing_ok=True)

    def _not_written(self, reason: str) -> UsageError:
        return UsageError("cannot-write", name="predictions", file=str(self._final), reason=reason)


def header(rows: NDArray[Any], total: int) -> bytes:
    """Return the beginning of a .npy file of `total` rows like these."""
    fields = np.lib.format.header_data_from_array_1_0(rows)
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {**fields, "shape": (total, *rows.shape[1:])})
    return text.getvalue()


def as_numpy(layout: RowLayout, tensor: Tensor) -> NDArray[Any]:
    """Return the rows of the only column as an array. Raises UsageError if there are
    more, or for a dtype that numpy lacks.
    """
    if layout.container != "tensor":
        raise UsageError("npy-holds-one-tensor", layout=str(layout))
    try:
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        return tensor.numpy()
    except TypeError:
        (column,) = layout.columns
        raise UsageError("column-not-writable", column=column.name, kind=str(column)) from None
