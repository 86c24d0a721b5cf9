"""The part of each parameter that this rank holds, as a plain tensor: the reducer and the optimizer
need not support DTensor.

    blocks.0.layer.0.weight     DTensor [640, 160] over 2 tensor ranks
                             -> Parameter [320, 160] in the same memory

torch's optimizers that update many tensors at once refuse a list that mixes DTensors with plain
tensors. They accept a list of plain tensors.

Checkpoints hold whole tensors, whatever the mesh. DTensor gathers a parameter, or the optimizer's
state of it, from its parts, and cuts a whole tensor into parts; one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from lockstep.config.mesh import Mesh
from lockstep.errors import UsageError
from lockstep.gradients.saved_state import TensorPiece
from lockstep.updates.shards import check_elementwise


class Locals:
    """This rank's parts of a module that was split (tensor.py), sharded (sharded_parameters.py),
    both or neither. Create it before the module's first forward.

    `module` is a tree of modules without a forward, for the reducer, the optimizer and checkpoints.
    Its parameters and buffers have the original's names. Parameters that are not cut, and all
    buffers, are the original's own objects.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, rank: int) -> None:
        self._original = module
        self._at = mesh.at(rank)
        # of the ranks that together hold the parts
        self._rank = self._at.shard * mesh.tensor + self._at.tensor
        self._ranks = mesh.shard * mesh.tensor
        self._plain: dict[int, nn.Parameter] = {}
        self._cut: dict[str, DTensor] = {}
        """The parameters that are cut, by each of their names."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor):
                self._cut[name] = parameter
                if id(parameter) not in self._plain:
                    plain = nn.Parameter(_local(parameter), parameter.requires_grad)
                    self._plain[id(parameter)] = plain
        self.module = self._copied(module)

    def _copied(self, module: nn.Module) -> nn.Module:
        tree = nn.Module()
        for name, parameter in module._parameters.items():
            tree.register_parameter(name, self._plain.get(id(parameter), parameter))
        for name, buffer in module._buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            tree.register_buffer(name, buffer, persistent)
        for name, child in module._modules.items():
            tree.add_module(name, None if child is None else self._copied(child))
        return tree

    def collect(self) -> None:
        """Add the gradients of the cut parameters to those of the plain parameters, after a
        backward.
        """
        for parameter in self._cut.values():
            gradient = parameter.grad
            if gradient is None:
                continue
            assert isinstance(gradient, DTensor)
            if gradient.placements != parameter.placements:
                # torch may leave the sum over the ranks to the reader of a gradient
                gradient = gradient.redistribute(placements=parameter.placements)
            local = _local(gradient)
            plain = self._plain[id(parameter)]
            assert local.shape == plain.shape
            if plain.grad is None:
                plain.grad = local
            else:
                plain.grad += local
            parameter.grad = None

    def adopt(self, optimizer: Optimizer) -> None:
        """Replace the original's parameters in an optimizer by this rank's parts; its options stay.

        Raises UsageError if it already has state, if it holds other parameters, or if its update of
        an element depends on other elements: it would see only a part of these.
        """
        if optimizer.state:
            raise UsageError("optimizer-has-state", optimizer=type(optimizer).__name__)
        if self._cut:
            check_elementwise(type(optimizer))
        known = {id(parameter) for parameter in self.module.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [
                self._plain.get(id(parameter), parameter) for parameter in group["params"]
            ]
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise UsageError(
                        "optimizer-of-another-model", group=number, shape=list(parameter.shape)
                    )

    def counted(self, name: str) -> bool:
        """Whether this rank's part of a parameter counts in a sum over all ranks of the shard
        and tensor axes, in which each element must count once.
        """
        axes = self._axes(name)
        if "shard" not in axes and self._at.shard > 0:
            return False
        return "tensor" in axes or self._at.tensor == 0

    def cut_by_tensor(self, name: str) -> bool:
        """Whether the tensor axis cuts a parameter. `name` may also name the optimizer state of a
        parameter ("exp_avg/head.weight"), or a buffer, which is never cut.
        """
        _, _, parameter = name.partition("/")
        return "tensor" in self._axes(name) or "tensor" in self._axes(parameter)

    def _axes(self, name: str) -> list[str]:
        """Return the axes that cut a parameter."""
        if name not in self._cut:
            return []
        cut = self._cut[name]
        names = cut.device_mesh.mesh_dim_names or ()
        pairs = zip(names, cut.placements, strict=True)
        return [axis for axis, placement in pairs if not placement.is_replicate()]

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Return the whole tensor of this rank's part of a parameter, or of its optimizer state.
        State with another shape than the part, and buffers, are not cut. All ranks of the shard
        and tensor axes call it.
        """
        cut = self._cut.get(name)
        if cut is None or local.shape != self._plain[id(cut)].shape:
            return local
        tensor = DTensor.from_local(
            local, cut.device_mesh, cut.placements, shape=cut.shape, stride=cut.stride()
        )
        placements = list(cut.placements)
        for dim in range(len(placements)):  # the axis that cut last comes first
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
        return tensor.full_tensor()

    def pieces(self, label: str, name: str, local: Tensor) -> list[TensorPiece]:
        """Return what this rank writes, under the name `label`, of a parameter, of its optimizer
        state, or of a buffer. The ranks of the shard and tensor axes write an equal share each.

        `local` is this rank's part, or the whole tensor if it is not cut. All ranks of these axes
        call it, in the same order.
        """
        tensor = self.gather(name, local.detach())
        if self._ranks == 1 or tensor.dim() == 0:
            if self._rank == 0:
                return [TensorPiece(label, tensor)]
            return []
        tensor = tensor.contiguous()
        start = tensor.numel() * self._rank // self._ranks
        stop = tensor.numel() * (self._rank + 1) // self._ranks
        if start == stop and self._rank:
            return []
        # a copy, which does not keep the memory of the whole tensor
        data = tensor.reshape(-1)[start:stop].to("cpu", copy=True)
        return [TensorPiece(label, data, start, tuple(tensor.shape), tensor.stride())]

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter, of its optimizer state, or of a buffer.
        No communication.
        """
        cut = self._cut.get(name)
        if cut is None or tensor.shape != cut.shape:
            return tensor
        part = distribute_tensor(tensor, cut.device_mesh, cut.placements, src_data_rank=None)
        return part.to_local().clone()

    def free(self) -> None:
        """Free the parameters that FSDP has gathered. After a forward without a backward FSDP
        keeps those of the root, and would compute with old values.
        """
        for module in self._original.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's parts of whole tensors into its own tensors, by name."""
        self.free()
        state = self.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in tensors:
                state[name].copy_(self.part(name, tensor))


def _local(tensor: DTensor) -> Tensor:
    local: Any = tensor._local_tensor  # with grad enabled, to_local() makes a new tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local.detach()
