"""Sharded parameters (FSDP; ZeRO-3): each rank of the shard axis keeps a part of every parameter,
its gradient and its optimizer state.

    forward    all-gather a unit's parameters, compute, free them
    backward   all-gather them again, compute, sum the gradients and keep this rank's part of the
               sum (reduce-scatter)

torch's `fully_shard` does this (Zhao et al., PyTorch FSDP, 2023; Rajbhandari et al., ZeRO, 2020).
This file chooses the units, and makes torch sum gradients without a division: the Stepper divides
by the weight of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_leaves


def shard_parameters(module: nn.Module, shard_mesh: DeviceMesh) -> None:
    """Cut every parameter of `module` along its first dim. Every rank of the axis must hold the
    same module, with the same values.

    After a backward the gradients are sums over the ranks of the axis. Layers that are already cut
    along the tensor axis may be cut again. All ranks must run the module equally often, forward and
    backward: see `take_part`. torch names parameters that it cannot cut in a ValueError or
    NotImplementedError.
    """
    if shard_mesh.size() == 1:
        return
    for unit in units_of(module):
        fully_shard(unit, mesh=shard_mesh)
    root: FSDPModule = fully_shard(module, mesh=shard_mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # else torch asks the backend to sum and multiply by 1, which gloo cannot do
            part.set_force_sum_reduction_for_comms(True)
    # else ranks that use different parameters would add gradients of different parameters
    root.set_reduce_scatter_unused_params(True)


def units_of(module: nn.Module) -> list[nn.Module]:
    """Return the units of `module`; the parameters of a unit are gathered together. A unit is a
    repeated block: a member of an outermost nn.Sequential or nn.ModuleList.

    Parameters outside of units, and blocks that share a parameter with other modules, are gathered
    with the root.
    """
    owners = _owners(module)
    units = []
    for block in _blocks(module):
        inside = _owners(block)
        if inside and all(owners[key] == count for key, count in inside.items()):
            units.append(block)
    return units


def _owners(module: nn.Module) -> Counter[int]:
    """Return the number of modules in `module` that own a parameter, by the parameter's id."""
    owned = (part.parameters(recurse=False) for part in module.modules())
    return Counter(map(id, chain.from_iterable(owned)))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    repeated = isinstance(module, (nn.Sequential, nn.ModuleList))
    for child in module.children():
        if repeated and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child
        else:
            yield from _blocks(child)


def take_part(module: nn.Module, run: Callable[[], Any]) -> None:
    """Take part in the collectives of a micro-batch that only other ranks of the shard axis have.
    `run` is a forward on any valid input.

    It adds zeros to the gradients, and restores `module`'s buffers. The forwards and backwards of
    the other ranks wait for this rank, unit by unit. So every rank must run as many as the rank
    with the most micro-batches.
    """
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    outputs = [
        leaf for leaf in tree_leaves(run()) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
