"""Which elements of a parameter a rank holds, and so what it writes of it and what it takes from
the whole: a box, a range in each dim.

    tensor axis   cuts one dim into equal parts                    (tensor.py)
    shard axis    cuts dim 0 of what is left, the last parts shorter or empty, as torch.chunk does    (sharded_parameters.py)

The box follows from how the two cut, and asks no rank: a checkpoint of any mesh loads at any other.
Checkpoints know intervals of elements (checkpoints/pieces.py); a box that is none is first joined
with those of the other tensor ranks, one parameter at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lockstep.checkpoints.pieces import TensorPiece
from lockstep.collectives.group import Group
from lockstep.config.mesh import Coordinates


@dataclass(frozen=True, slots=True)
class Box:
    """A rank's part of a tensor of shape `shape`."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: tuple[int, int] | None = None
    """Which dim the tensor axis cuts, over how many ranks."""
    sharded: bool = False
    """Whether the shard axis cuts dim 0."""

    def take(self, whole: Tensor) -> Tensor:
        """What is in the box. A tensor of another shape, such as an optimizer's count of steps,
        is whole everywhere.
        """
        if tuple(whole.shape) != self.shape:
            return whole
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole.contiguous()

    def counts(self, at: Coordinates) -> bool:
        """Whether this rank is the first of those that hold these same elements of one replica."""
        return (self.tensor is not None or at.tensor == 0) and (self.sharded or at.shard == 0)

    @property
    def interval(self) -> tuple[int, int] | None:
        """[start, stop) of its elements in the order of memory of the whole; None where they do
        not lie in a row.
        """
        if 0 in self.sizes:
            return 0, 0
        cut = [dim for dim, size in enumerate(self.sizes) if size < self.shape[dim]]
        if not cut:
            return 0, math.prod(self.shape)
        if any(size > 1 for size in self.sizes[: max(cut)]):
            return None
        strides = contiguous_strides(self.shape)
        start = sum(first * stride for first, stride in zip(self.starts, strides, strict=True))
        return start, start + math.prod(self.sizes)


def box_of(parameter: Tensor, at: Coordinates) -> Box:
    """Where a module's parameter, cut or not, has its part that is on this rank."""
    shape = tuple(parameter.shape)
    starts, sizes = [0] * len(shape), list(shape)
    tensor, sharded = None, False
    if isinstance(parameter, DTensor):
        names, mesh = parameter.device_mesh.mesh_dim_names or (), parameter.device_mesh
        for axis in ("tensor", "shard"):  # in the order in which they were cut
            placement = parameter.placements[names.index(axis)] if axis in names else None
            if not isinstance(placement, (Shard, _StridedShard)):
                continue
            dim, count = placement.dim % len(shape), mesh.size(names.index(axis))
            step = -(-sizes[dim] // count)
            first = min(getattr(at, axis) * step, sizes[dim])
            starts[dim] += first
            sizes[dim] = min(step, sizes[dim] - first)
            tensor = (dim, count) if axis == "tensor" else tensor
            sharded = sharded or axis == "shard"
        assert tuple(sizes) == tuple(parameter._local_tensor.shape), (
            f"{tuple(sizes)} is not {tuple(parameter._local_tensor.shape)}"
        )
    return Box(shape, tuple(starts), tuple(sizes), tensor, sharded)


def pieces(name: str, box: Box, local: Tensor, at: Coordinates, tensor: Group) -> list[TensorPiece]:
    """What this rank writes of a parameter, or of optimizer state beside it: over one replica every
    element once.

    All ranks of one replica that hold the parameter call it, in the same order; `tensor` is their
    Group along that axis. State of another shape than the parameter's part is whole everywhere, and
    the first rank writes it.
    """
    if tuple(local.shape) != box.sizes or local.dim() == 0:
        return [TensorPiece(name, local)] if at.tensor == 0 and at.shard == 0 else []
    if box.tensor is not None and _joined(box).interval is not None and box.interval is None:
        local, box = _join(box, local, tensor), _joined(box)
    return _written(name, box, local, at)


def _written(name: str, box: Box, local: Tensor, at: Coordinates) -> list[TensorPiece]:
    interval = box.interval
    assert interval is not None
    if not box.counts(at):
        return []
    if box.sizes == box.shape:
        return [TensorPiece(name, local)]
    if interval[0] == interval[1]:
        return []
    return [
        TensorPiece(
            name, local.detach().reshape(-1), interval[0], box.shape, contiguous_strides(box.shape)
        )
    ]


def _joined(box: Box) -> Box:
    """That of all ranks of the tensor axis together."""
    assert box.tensor is not None
    starts, sizes = list(box.starts), list(box.sizes)
    dim = box.tensor[0]
    starts[dim], sizes[dim] = 0, box.shape[dim]
    return Box(box.shape, tuple(starts), tuple(sizes), None, box.sharded)


def _join(box: Box, local: Tensor, tensor: Group) -> Tensor:
    """What the ranks of the tensor axis hold, side by side. Their parts are equally large."""
    assert box.tensor is not None
    dim, count = box.tensor
    parts = tensor.all_gather(local.detach().movedim(dim, 0).contiguous(), place="for a checkpoint")
    return parts.movedim(0, dim).contiguous() if count > 1 else local


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
