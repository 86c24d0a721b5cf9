"""Tensor parallelism: the matrices of some layers are cut over the ranks of the tensor axis, with
torch's DTensor.

    colwise   whole input -> a part of the outputs on each rank; no communication
    rowwise   a part of the inputs on each rank -> the whole output; one all-reduce

A pair (colwise, then an elementwise function or attention with whole heads, then rowwise) costs one
all-reduce per forward and one per backward (Shoeybi et al., Megatron-LM, 2019, section 3). Every
rank of the axis holds and computes all other layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from lockstep.config.parts import Parts
from lockstep.errors import TaskError


def plan_of(model: nn.Module, parts: Parts, count: int) -> dict[str, str]:
    """Return the style of each layer of a whole model that `parts.tensor` names, for `count` ranks.

    Call it before the model is cut into stages, because a tie between two stages is not visible in
    either. Raises TaskError for a wrong plan. A rowwise layer without a colwise one before it is
    torch's error in the first forward.
    """
    if not parts.tensor:
        raise TaskError("tensor-plan-missing", count=count)
    layers = dict(model.named_modules())
    plan: dict[str, str] = {}
    for pattern, style in parts.tensor.items():
        names = [name for name in layers if fits(pattern, name)]
        if not names:
            near = get_close_matches(pattern, filter(None, layers), n=3, cutoff=0)
            raise TaskError("pattern-fits-nothing", pattern=pattern, near=near)
        for name in names:
            if plan.setdefault(name, style) != style:
                raise TaskError("pattern-conflict", layer=name, pattern=pattern)
    if "colwise" in plan.values() and "rowwise" not in plan.values():
        raise TaskError("colwise-without-rowwise")
    if parts.heads is not None:
        _check_size("attention heads", parts.heads, count)
    _check_not_tied(model, plan)
    for name, style in plan.items():
        layer = layers[name]
        if not isinstance(layer, (nn.Linear, nn.Embedding)):
            raise TaskError("layer-cannot-be-cut", layer=name, kind=type(layer).__name__)
        # the weight of nn.Linear is [outputs, inputs], that of nn.Embedding [inputs, outputs]
        dim = int((style == "rowwise") != isinstance(layer, nn.Embedding))
        _check_size(f"{name} ({style})", layer.weight.shape[dim], count)
    return plan


def split_tensors(module: nn.Module, plan: Mapping[str, str], tensor_mesh: DeviceMesh) -> None:
    """Cut the layers of `module` that are in the plan; it may be a part of the model. Every rank of
    the axis must hold the same module, with the same values. No communication: each rank keeps its
    part.
    """
    layers = dict(module.named_modules())
    styles = {name: _style(layers[name], style) for name, style in plan.items() if name in layers}
    if styles:
        parallelize_module(module, tensor_mesh, styles, src_data_rank=None)


def fits(pattern: str, name: str) -> bool:
    """Whether `pattern` matches a module's dotted name. `*` matches any text within one part of the
    name, but no dot.
    """
    patterns = pattern.split(".")
    parts = name.split(".")
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))


def _check_size(name: str, size: int, count: int) -> None:
    if size % count:
        raise TaskError("not-equal-parts", name=name, size=size, count=count)


def _check_not_tied(model: nn.Module, plan: Collection[str]) -> None:
    """Raise a TaskError if a layer to be cut shares a parameter with another layer. torch gives the
    cut layer new parameters, which would silently break the tie.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        cut = [name for name in names if name.rpartition(".")[0] in plan]
        if len(names) > 1 and cut:
            raise TaskError("tied-layers-in-plan", names=" and ".join(names), first=cut[0])


def _style(layer: nn.Module, style: str) -> ParallelStyle:
    if style == "colwise":
        return ColwiseParallel()
    if isinstance(layer, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel()
