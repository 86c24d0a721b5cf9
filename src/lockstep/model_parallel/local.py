"""The part of each parameter that this rank holds, as a plain tensor: the reducer and the optimizer
need not support DTensor.

    blocks.0.layer.0.weight     DTensor [640, 160] over 2 tensor ranks
                             -> Parameter [320, 160] in the same memory

torch's optimizers that update many tensors at once refuse a list that mixes DTensors with plain
tensors. They accept a list of plain tensors.

A box, a range in each dim, describes which elements of a parameter a rank holds. The rank writes
these elements to a checkpoint, and takes them from whole tensors in one.

    tensor axis   cuts one dim into equal parts (tensor.py)
    shard axis    cuts dim 0 of the remaining part; as with torch.chunk, the last parts may be
                  shorter or empty (sharded_parameters.py)

A rank computes its box from these rules, without communication. So a checkpoint of any mesh loads
on any other mesh. Checkpoints store intervals of elements (checkpoints/pieces.py). A box that is no
interval is first joined with the boxes of the other tensor ranks, one parameter at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

from lockstep.checkpoints.pieces import TensorPiece
from lockstep.collectives.group import Group
from lockstep.config.mesh import Coordinates
from lockstep.errors import UsageError
from lockstep.updates.shards import check_elementwise


@dataclass(frozen=True, slots=True)
class Box:
    """A rank's part of a tensor of shape `shape`."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: tuple[int, int] | None = None
    """(dim, ranks): the dim that the tensor axis cuts, and the number of ranks; None if uncut."""
    sharded: bool = False
    """Whether the shard axis cuts dim 0."""

    def take(self, whole: Tensor) -> Tensor:
        """Return the part of `whole` in the box. A tensor of another shape, such as an optimizer's
        count of steps, is not cut, and returned whole.
        """
        if tuple(whole.shape) != self.shape:
            return whole
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole.contiguous()

    def counts(self, at: Coordinates) -> bool:
        """Whether this rank is the first one in its replica that holds these elements."""
        return (self.tensor is not None or at.tensor == 0) and (self.sharded or at.shard == 0)

    @property
    def interval(self) -> tuple[int, int] | None:
        """[start, stop) of the box's elements in the memory order of the whole tensor; None if the
        elements are not contiguous.
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
    """Return the box of this rank's part of a module's parameter, which may be cut or not."""
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
    """Return what this rank writes of a parameter, or of its optimizer state. Over one replica
    every element is written once.

    All ranks of one replica that hold the parameter call it, in the same order. `tensor` is their
    Group along the tensor axis. State with another shape than the parameter's part is not cut, and
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
    """Return the box of all ranks of the tensor axis together."""
    assert box.tensor is not None
    starts, sizes = list(box.starts), list(box.sizes)
    dim = box.tensor[0]
    starts[dim], sizes[dim] = 0, box.shape[dim]
    return Box(box.shape, tuple(starts), tuple(sizes), None, box.sharded)


def _join(box: Box, local: Tensor, tensor: Group) -> Tensor:
    """Gather the parts of all ranks of the tensor axis, and join them. All have the same size."""
    assert box.tensor is not None
    dim, count = box.tensor
    parts = tensor.all_gather(local.detach().movedim(dim, 0).contiguous(), place="for a checkpoint")
    return parts.movedim(0, dim).contiguous() if count > 1 else local


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class _Pair:
    """A parameter that is cut, and this rank's part of it. Both use the same memory."""

    whole: DTensor
    here: nn.Parameter


class Locals:
    """This rank's parts of a module that was split (tensor.py), sharded (sharded_parameters.py),
    both or neither. Create it before the module's first forward.

    `module` is a tree of modules without a forward, for the reducer, the optimizer and checkpoints.
    Its parameters and buffers have the original's names. Parameters that are not cut, and all
    buffers, are the original's own objects.
    """

    def __init__(self, module: nn.Module, at: Coordinates) -> None:
        self._original = module
        self._at = at
        self._pairs: dict[int, _Pair] = {}
        self.module = self._copied(module)
        self.boxes: dict[str, Box] = {}
        """By parameter name: the box of the elements that this rank holds."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.boxes[name] = box_of(parameter, at)

    def _copied(self, module: nn.Module) -> nn.Module:
        tree = nn.Module()
        for name, parameter in module._parameters.items():
            tree.register_parameter(name, self._plain(parameter))
        for name, buffer in module._buffers.items():
            tree.register_buffer(
                name, buffer, persistent=name not in module._non_persistent_buffers_set
            )
        for name, child in module._modules.items():
            tree.add_module(name, None if child is None else self._copied(child))
        return tree

    def _plain(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if not isinstance(parameter, DTensor):
            return parameter
        pair = self._pairs.get(id(parameter))
        if pair is None:
            here = nn.Parameter(_local(parameter), requires_grad=parameter.requires_grad)
            pair = self._pairs[id(parameter)] = _Pair(parameter, here)
        return pair.here

    def collect(self) -> None:
        """Add the gradients of the cut parameters to those of the plain parameters, after a
        backward.
        """
        for pair in self._pairs.values():
            gradient = pair.whole.grad
            if gradient is None:
                continue
            assert isinstance(gradient, DTensor)
            if gradient.placements != pair.whole.placements:
                # torch may leave the sum over the ranks to the reader of a gradient
                gradient = gradient.redistribute(placements=pair.whole.placements)
            mine = _local(gradient)
            assert mine.shape == pair.here.shape
            if pair.here.grad is None:
                pair.here.grad = mine
            else:
                pair.here.grad += mine
            pair.whole.grad = None

    def adopt(self, optimizer: Optimizer) -> None:
        """Replace the original's parameters in an optimizer by this rank's parts; its options stay.

        Raises UsageError if it already has state, if it holds other parameters, or if its update of
        an element depends on other elements: it would see only a part of these.
        """
        if optimizer.state:
            raise UsageError("optimizer-has-state", optimizer=type(optimizer).__name__)
        if any(pair.here.numel() != pair.whole.numel() for pair in self._pairs.values()):
            check_elementwise(type(optimizer))
        known = {id(parameter) for parameter in self.module.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [self._known(each, known, number) for each in group["params"]]

    def _known(self, parameter: Tensor, known: set[int], number: int) -> Tensor:
        pair = self._pairs.get(id(parameter))
        if pair is None and id(parameter) not in known:
            raise UsageError(
                "parameter-not-of-model", group=number, shape=str(list(parameter.shape))
            )
        return parameter if pair is None else pair.here

    def counted(self, name: str) -> bool:
        """Whether this rank's part of a parameter counts in a sum over all ranks of the shard
        and tensor axes, in which each element must count once.
        """
        return self.boxes[name].counts(self._at)

    def cut_by_tensor(self, name: str) -> bool:
        """Whether the tensor axis cuts a parameter. `name` may also name the optimizer state of a
        parameter ("exp_avg/head.weight"), or a buffer, which is never cut.
        """
        box = self.boxes.get(name) or self.boxes.get(name.partition("/")[2])
        return box is not None and box.tensor is not None

    def pieces(self, prefix: str, name: str, tensor: Tensor, along: Group) -> list[TensorPiece]:
        """Return what this rank writes of a parameter, of its optimizer state, or of a buffer. Over
        one replica every element is written once.

        `tensor` is this rank's part, or the whole tensor if it is not cut. The ranks of the tensor
        axis (`along`) call it in the same order.
        """
        box = self.boxes.get(name)
        if box is None:
            return (
                [TensorPiece(prefix + name, tensor)]
                if self._at.tensor == 0 and self._at.shard == 0
                else []
            )
        return pieces(prefix + name, box, tensor, self._at, along)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter, of its optimizer state, or of a buffer.
        No communication.
        """
        return self.boxes[name].take(whole) if name in self.boxes else whole

    def let_go(self) -> None:
        """Free the parameters that FSDP has gathered. After a forward without a backward FSDP
        keeps those of the root, and would compute with old values.
        """
        for module in self._original.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's parts of whole tensors into its own tensors, by name."""
        self.let_go()
        state = self.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, whole in tensors:
                state[name].copy_(self.take(name, whole))


def _local(tensor: DTensor) -> Tensor:
    found: Any = tensor._local_tensor  # with grad enabled, to_local() makes a new tensor
    return found.wait() if isinstance(found, AsyncCollectiveTensor) else found.detach()
