"""What a model returns for a batch, as named columns: one row a sample, whatever the container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.collectives.broadcast_json import everybodys
from lockstep.data.rows import Piece
from lockstep.errors import UsageError
from lockstep.world.world import World


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    dtype: str
    """torch's name of it, such as "float32"."""
    shape: tuple[int, ...]
    """Of one row."""

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

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> RowLayout:
        """From what JSON has made of its `asdict`."""
        return cls(
            found["container"],
            tuple(
                Column(each["name"], each["dtype"], tuple(each["shape"]))
                for each in found["columns"]
            ),
        )

    def joined(self, tensors: Sequence[Tensor]) -> Any:
        """Columns back in the model's container."""
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
    """The columns of one batch's output, on the CPU, with no memory but their own. Raises
    UsageError where a row is not a sample.
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
    """Raise UsageError where two batches gave other columns."""
    if first != other:
        raise UsageError(
            "columns-differ", columns=str(other), where=where, first=str(first), of_first=of_first
        )


def agreed(mine: RowLayout | None, total: int, world: World) -> RowLayout:
    """The layout of all ranks' batches, also on a rank that had none. A collective; raises
    UsageError on all ranks where they differ.
    """
    found = everybodys(
        [total, None if mine is None else asdict(mine)],
        world.control,
        "for the columns of predictions",
    )
    for rank, (rows, _) in enumerate(found):
        if rows != found[0][0]:
            raise UsageError("ranks-given-other-data", rank=rank, rows=rows, first=found[0][0])
    first = RowLayout.from_json(found[0][1])  # rank 0 has the first batch
    for rank, (_, layout) in enumerate(found):
        other = first if layout is None else RowLayout.from_json(layout)
        same(first, other, f"the batches of rank {rank}", "those of rank 0")
    return first
