"""PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy and Jaggi, NeurIPS
2019).

    M  [n, m]   the gradient of one parameter, plus what this rank owes of it
    P  [n, r] = M Q                     summed over all ranks (first all-reduce), then its columns
                                        are made orthonormal
    Q  [m, r] = transposed M times P    summed over all ranks (second all-reduce)
    sum of all M, nearly = P times transposed Q    equal on all ranks

This is one step of subspace iteration. It begins with the Q of the step before (warm start), so
that over the steps P and Q follow the largest singular vectors. r (n + m) numbers travel instead
of n m. Their sums are ordinary sums, so any backend can add them on the way. Vectors, and matrices
that would not get smaller, travel whole, with P. A bucket needs two all-reduces, however many
matrices it holds. The second one leaves in `wait`, where every rank has the same order of buckets.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.config.parallelism import Compression
from lockstep.errors import LockstepWarning, UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.compression.compressed import Compressor, Stages
from lockstep.gradients.layout import Span

_NAME = "powersgd/"


class PowerSGD(Compressor):
    """Sends factors of `rank` columns. Every rank computes the results from the same sums. They
    have the same bits if the ranks have the same kind of processor and as many threads.
    """

    def __init__(self, group: Group, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._bases: dict[str, Tensor] = {}  # Q, by parameter, orthonormal

    def sum(self, flat: Tensor, bucket: Bucket) -> Stages:
        factored, uncompressed = self._split(bucket)
        matrices, bases, parts = [], [], []
        for span, shape in factored:
            matrix = flat[span.start : span.stop].view(shape)
            basis = self._basis(span.name, matrix)
            matrices.append(matrix)
            bases.append(basis)
            parts.append(times(matrix, basis))
        for span in uncompressed:
            parts.append(flat[span.start : span.stop])
        message, sums = joined(parts)
        yield self._group.all_reduce(message, place=bucket.place)
        total = torch.zeros_like(flat)
        left = torch.zeros_like(flat)
        for span, part in zip(uncompressed, sums[len(factored) :], strict=True):
            total[span.start : span.stop].copy_(part)
        if not factored:
            return total, left
        columns = [orthonormal(part) for part in sums[: len(factored)]]
        local = []
        for matrix, column in zip(matrices, columns, strict=True):
            local.append(times(matrix.t(), column))
        message, sums = joined(local)
        yield self._group.all_reduce(message, place=bucket.place)
        for number, (span, shape) in enumerate(factored):
            piece = slice(span.start, span.stop)
            column = columns[number]
            sent = times(column, local[number].t())
            total[piece].view(shape).copy_(times(column, sums[number].t()))
            left[piece].view(shape).copy_(matrices[number] - sent)
            self._bases[span.name] = following(sums[number], bases[number])
        return total, left

    def _split(self, bucket: Bucket) -> tuple[list[tuple[Span, tuple[int, int]]], list[Span]]:
        """Return the matrices, each with its shape, and the spans that travel whole."""
        matrices: list[tuple[Span, tuple[int, int]]] = []
        uncompressed: list[Span] = []
        for span, view in zip(bucket.spans, bucket.views, strict=True):
            shape = matrix_of(view)
            if shape is not None and pays(self._rank, shape):
                matrices.append((span, shape))
            else:
                uncompressed.append(span)
        return matrices, uncompressed

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        """Return Q of the step before. At first, return random columns that are the same on all
        ranks and in all runs.
        """
        shape = (matrix.shape[1], self._rank)
        known = self._bases.get(name)
        if known is None or known.shape != shape:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            known = orthonormal(torch.randn(shape, generator=generator, dtype=matrix.dtype))
        return known.to(matrix)

    def kept(self) -> Mapping[str, Tensor]:
        return {_NAME + name: basis for name, basis in self._bases.items()}

    def take_back(self, common: Mapping[str, Tensor]) -> None:
        self._bases = {
            name.removeprefix(_NAME): basis
            for name, basis in common.items()
            if name.startswith(_NAME)
        }


def matrix_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return the shape of a tensor's elements, in the order of memory, as a matrix: the outermost
    dim by all others. None if the tensor is no matrix.

    So channels_last kernels and transposed weights are matrices without a copy. A transposed weight
    gives the transposed matrix.
    """
    sides = [
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    ]
    if tensor.numel() == 0 or len(sides) < 2:
        return None
    outermost = max(sides)[1]
    return outermost, tensor.numel() // outermost


def pays(rank: int, shape: tuple[int, int]) -> bool:
    """Whether the factors are smaller than the matrix."""
    return rank * (shape[0] + shape[1]) < shape[0] * shape[1]


def times(one: Tensor, other: Tensor) -> Tensor:
    """Return a product in the dtype of its factors, also inside the user's autocast."""
    with torch.autocast(one.device.type, enabled=False):
        return one @ other


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' span. It always has as many columns: it is
    completed if the columns are dependent, even for a zero matrix.
    """
    basis: Tensor = torch.linalg.qr(columns).Q
    # the strides it has after a checkpoint: products with other strides have other bits
    return basis.contiguous()


def following(sums: Tensor, before: Tensor) -> Tensor:
    """Return the next step's Q. If the sums are zeros or contain nan, keep the one before."""
    useful = sums.isfinite().all() & (sums != 0).any()
    return torch.where(useful, orthonormal(sums), before)


def joined(parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return all parts in one flat tensor, and their views in it. An all-reduce of the flat tensor
    leaves the sums in the views.
    """
    flat = torch.cat([part.reshape(-1) for part in parts])
    pieces = flat.split([part.numel() for part in parts])
    return flat, [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def check_matrices(compression: Compression, model: nn.Module, rank: int) -> None:
    """Raise UsageError if PowerSGD's factors had more columns than any gradient has rows or
    columns. Warn if no gradient gets smaller.
    """
    if compression.kind != "powersgd":
        return
    assert compression.rank is not None
    columns = compression.rank
    shapes = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shape = matrix_of(parameter)
            if shape is not None:
                shapes[name] = shape
    if not shapes:
        raise UsageError("powersgd-without-matrix", compress=str(compression))
    name, shape = max(shapes.items(), key=lambda item: min(item[1]))
    if columns > min(shape):
        raise UsageError(
            "powersgd-rank-too-large",
            compress=str(compression),
            columns=columns,
            parameter=name,
            rows=shape[0],
            width=shape[1],
            advice=max(1, min(shape) // 8),
        )
    if rank == 0 and not any(pays(columns, shape) for shape in shapes.values()):
        warnings.warn(
            f"compress='{compression}' makes no gradient of this model smaller, so all gradients"
            " are sent uncompressed. Choose a smaller rank",
            LockstepWarning,
            stacklevel=2,
        )
