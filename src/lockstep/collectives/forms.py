"""Shapes and dtypes that ranks tell each other before tensors of different lengths travel, and
tensors as plain bytes.

What only moves data can move any dtype: backends that know few of them are given bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.collectives.tags import short_dtype
from lockstep.errors import CollectiveMismatch, UsageError

_MOST_DIMS = 8
_ALIGNMENT = 16  # bytes, so that any dtype can be seen in a buffer of bytes
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{','.join(map(str, self.shape))}]"

    def any_length(self) -> str:
        """What must be alike on all ranks: all but the length of dim 0."""
        return f"{short_dtype(self.dtype)}[{','.join(['*', *map(str, self.shape[1:])][: len(self.shape)])}]"

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def encode(self) -> list[int]:
        """As a row of numbers, of one length for all."""
        if self.dtype not in _DTYPES or len(self.shape) > _MOST_DIMS:
            raise UsageError(
                f"a tensor {self} cannot be described to other ranks: it may have {_MOST_DIMS} dims"
                " and one of torch's number types"
            )
        return [
            _DTYPES.index(self.dtype),
            len(self.shape),
            *self.shape,
            *[0] * (_MOST_DIMS - len(self.shape)),
        ]

    @classmethod
    def decode(cls, row: Sequence[int]) -> Form:
        return cls(_DTYPES[row[0]], tuple(row[2 : 2 + row[1]]))


ROW = 2 + _MOST_DIMS
"""Numbers of an encoded form."""


def exchange(group: Group, mine: Sequence[Form], kind: str) -> list[list[Form]]:
    """Every rank's forms, by rank; all ranks give equally many. A small collective on the host,
    which other ranks see as `kind`.
    """
    text = (
        f"{kind} {mine[0].any_length()}"
        if len(mine) == 1
        else f"{kind} of {short_dtype(mine[0].dtype)}"
    )
    table = torch.tensor([form.encode() for form in mine], dtype=torch.int64).view(len(mine), ROW)
    rows = group.host.all_gather(table, text=text).view(group.size, len(mine), ROW).tolist()
    return [[Form.decode(row) for row in theirs] for theirs in rows]


def check_alike(kind: str, forms: Sequence[Form], group: Group) -> None:
    """Raise CollectiveMismatch, on all ranks, where more than the length of dim 0 differs."""
    first = forms[0]
    for rank, form in enumerate(forms):
        if (
            form.dtype != first.dtype
            or form.shape[1:] != first.shape[1:]
            or len(form.shape) != len(first.shape)
        ):
            raise CollectiveMismatch(
                f"#{group.number}: {kind}: rank {group.ranks[0]} has {first}, rank"
                f" {group.ranks[rank]} {form}. Only dim 0 may differ.",
                number=group.number,
            )


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements as bytes, flat: a view of a contiguous tensor, a copy of another."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(octets: Tensor, form: Form) -> Tensor:
    """The tensor that lies in these bytes, without a copy."""
    return octets[: form.bytes].view(form.dtype).view(form.shape)


def room_for(forms: Sequence[Form]) -> int:
    """Bytes that hold any of the tensors: exactly theirs where they are alike, else rounded up
    so that none lies askew behind another.
    """
    sizes = {form.bytes for form in forms}
    largest = max(sizes)
    return largest if len(sizes) == 1 else -(-largest // _ALIGNMENT) * _ALIGNMENT


def padded(tensor: Tensor, room: int) -> Tensor:
    """The tensor's bytes with `room` of them."""
    octets = as_bytes(tensor)
    if octets.numel() == room:
        return octets
    filled = octets.new_zeros(room)
    filled[: octets.numel()] = octets
    return filled
