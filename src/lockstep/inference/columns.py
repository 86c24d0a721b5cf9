"""What a model returns for a batch, as named columns: one row a sample, whatever the container."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.inference.rows import Piece


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
class Layout:
    """The columns of every batch, and the container that the model put them in: "tensor", "tuple", "list" or "dict"."""

    container: str
    columns: tuple[Column, ...]

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Layout:
        found = json.loads(text)
        return cls(found["container"], tuple(Column(each["name"], each["dtype"], tuple(each["shape"])) for each in found["columns"]))

    def joined(self, tensors: Sequence[Tensor]) -> Any:
        """Columns back in the model's container."""
        if self.container == "tensor":
            return tensors[0]
        if self.container == "dict":
            return {column.name: tensor for column, tensor in zip(self.columns, tensors, strict=True)}
        return list(tensors) if self.container == "list" else tuple(tensors)

    def __str__(self) -> str:
        return f"a {self.container} ({', '.join(map(str, self.columns))})"


def split(output: Any, piece: Piece) -> tuple[Layout, list[Tensor]]:
    """The columns of one batch's output, on the CPU, with no memory but their own. Raises UsageError where a row is not a sample."""
    container, parts = _parts(output)
    for name, part in parts.items():
        if not isinstance(part, Tensor):
            raise UsageError(
                f"the model returned a {type(part).__name__} as {name!r}: predict takes a tensor, or a tuple, list or dict of tensors; "
                "wrap the model in one that returns those"
            )
        if part.dim() == 0 or len(part) != len(piece.rows):
            rows = "no rows (a 0-d tensor)" if part.dim() == 0 else f"{len(part)} rows"
            raise UsageError(
                f"the model returned {rows} as {name!r} for the {len(piece.rows)} samples {piece.rows.start} to {piece.rows.stop - 1}: "
                "a prediction is one row a sample; use evaluate for what is pooled over a batch"
            )
    columns = [Column(name, str(part.dtype).removeprefix("torch."), tuple(part.shape[1:])) for name, part in parts.items()]
    return Layout(container, tuple(columns)), [_own(part) for part in parts.values()]


def _parts(output: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(output, Mapping):
        return "dict", {str(name): part for name, part in output.items()}
    if isinstance(output, (tuple, list)):
        return "list" if isinstance(output, list) else "tuple", {f"prediction_{number}": part for number, part in enumerate(output)}
    return "tensor", {"prediction": output}


def _own(part: Tensor) -> Tensor:
    plain = part.detach().cpu().contiguous()
    return plain.clone() if plain.untyped_storage().nbytes() > plain.nbytes else plain


def same(first: Layout, other: Layout, where: str, of_first: str) -> None:
    """Raise UsageError where two batches gave other columns."""
    if first != other:
        raise UsageError(f"the model returned {other} for {where} and {first} for {of_first}: every batch must have the same columns")
