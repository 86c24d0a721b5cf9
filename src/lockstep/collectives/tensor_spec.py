"""Shapes and dtypes that ranks exchange before they send tensors of different lengths, and tensors
as plain bytes.

A collective that only moves data can move any dtype: a backend that supports few dtypes gets bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.errors import CollectiveMismatch, UsageError
from lockstep.runtime.status import short_dtype

_MOST_DIMS = 8
_ALIGNMENT = 16  # bytes, so that a buffer of bytes can be viewed as any dtype
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
class TensorSpec:
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{','.join(map(str, self.shape))}]"

    def any_length(self) -> str:
        """Return what must be equal on all ranks: the form, with `*` as the length of dim 0."""
        if not self.shape:
            return str(self)
        return f"{short_dtype(self.dtype)}[{','.join(['*', *map(str, self.shape[1:])])}]"

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def encode(self) -> list[int]:
        """Return the form as ROW integers."""
        if self.dtype not in _DTYPES or len(self.shape) > _MOST_DIMS:
            raise UsageError("tensor-not-describable", form=str(self), dims=_MOST_DIMS)
        unused = [0] * (_MOST_DIMS - len(self.shape))
        return [_DTYPES.index(self.dtype), len(self.shape), *self.shape, *unused]

    @classmethod
    def decode(cls, row: Sequence[int]) -> TensorSpec:
        return cls(_DTYPES[row[0]], tuple(row[2 : 2 + row[1]]))


ROW = 2 + _MOST_DIMS  # integers of an encoded form


def exchange(group: Group, local: Sequence[TensorSpec], kind: str) -> list[list[TensorSpec]]:
    """Return every rank's forms, by rank. All ranks give the same number of forms. A small
    collective on the CPU, which other ranks see as `kind`.
    """
    count = len(local)
    text = f"{kind} of {short_dtype(local[0].dtype)}"
    if count == 1:
        text = f"{kind} {local[0].any_length()}"
    table = torch.tensor([form.encode() for form in local], dtype=torch.int64)
    by_rank = group.host.all_gather(table, text=text).view(group.size, count, ROW).tolist()
    return [list(map(TensorSpec.decode, rows)) for rows in by_rank]


def gathered_forms(group: Group, kind: str, tensor: Tensor) -> list[TensorSpec]:
    """Return every rank's form. Raises CollectiveMismatch, on all ranks, if more than the length of
    dim 0 differs.
    """
    forms = [form for (form,) in exchange(group, [TensorSpec.of(tensor)], kind)]
    first = forms[0]
    for rank, form in enumerate(forms):
        if form.any_length() != first.any_length():
            raise CollectiveMismatch(
                "collective-shapes-differ",
                number=group.number,
                kind=kind,
                first_rank=group.ranks[0],
                first=str(first),
                rank=group.ranks[rank],
                form=str(form),
            )
    return forms


def scattered_forms(
    group: Group, tensors: Sequence[Tensor] | None, root: int
) -> tuple[list[TensorSpec], Tensor]:
    """Return the forms of the tensors that rank `root` scatters, on all ranks, and an empty tensor
    of bytes on the device of the result.

    Raises UsageError before anything is sent, if another rank gives a list, or if the list has
    another length.
    """
    group.check_root(root)
    if (tensors is not None) != (group.rank == root):
        argument = "no list" if tensors is None else "a list"
        raise UsageError("scatter-list-not-of-root", rank=group.rank, what=argument, root=root)
    table = torch.zeros(group.size, ROW, dtype=torch.int64)
    if tensors is not None:
        check_pieces("scatter", tensors, group.size)
        rows = [TensorSpec.of(tensor).encode() for tensor in tensors]
        table = torch.tensor(rows, dtype=torch.int64)
    group.host.broadcast(table, root, text=f"scatter from {root}").wait()
    if tensors:
        device = tensors[0].device
    else:
        nccl = dist.get_backend(group.process_group) == "nccl"
        device = torch.device("cuda" if nccl else "cpu")
    like = torch.empty(0, dtype=torch.uint8, device=device)
    return [TensorSpec.decode(row) for row in table.tolist()], like


def arriving_forms(group: Group, tensors: Sequence[Tensor]) -> list[TensorSpec]:
    """Return the forms of what each rank sends to this one in an all-to-all."""
    check_pieces("all_to_all", tensors, group.size)
    by_rank = exchange(group, [TensorSpec.of(tensor) for tensor in tensors], "all_to_all")
    return [forms[group.rank] for forms in by_rank]


def check_pieces(kind: str, tensors: Sequence[Tensor], size: int) -> None:
    """Raise a UsageError unless there is one tensor for each of `size` ranks, all of one dtype."""
    if len(tensors) != size:
        raise UsageError("tensors-not-one-a-rank", kind=kind, count=len(tensors), size=size)
    dtypes = sorted({short_dtype(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        raise UsageError("mixed-dtypes", kind=kind, dtypes=dtypes)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements as flat bytes: a view of a contiguous tensor, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, form: TensorSpec) -> Tensor:
    """Return the tensor in these bytes, without a copy."""
    return data[: form.bytes].view(form.dtype).view(form.shape)


def padded_size(forms: Sequence[TensorSpec]) -> int:
    """Return a number of bytes that holds any of the tensors: their size if all are equal, else the
    largest, rounded up so that none is misaligned after another.
    """
    sizes = {form.bytes for form in forms}
    largest = max(sizes)
    if len(sizes) == 1:
        return largest
    return -(-largest // _ALIGNMENT) * _ALIGNMENT


def padded(tensor: Tensor, size: int) -> Tensor:
    """Return the tensor's bytes, padded with zeros to `size` bytes."""
    data = as_bytes(tensor)
    if data.numel() == size:
        return data
    longer = data.new_zeros(size)
    longer[: data.numel()] = data
    return longer
