"""Tensor parallelism: the matrices of some layers are cut over the ranks of the tensor axis, with
torch's DTensor.

    colwise   whole input -> a part of the outputs on each rank; no communication
    rowwise   a part of the inputs on each rank -> the whole output; one all-reduce

A pair (colwise, then an elementwise function or attention with whole heads, then rowwise) costs one
all-reduce per forward and one per backward (Shoeybi et al., Megatron-LM, 2019, section 3). Every
rank of the axis holds and computes all other layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from lockstep.errors import TaskError


def split_tensors(
    module: nn.Module,
    plan: Mapping[str, str],
    tensor_mesh: DeviceMesh,
    *,
    names: Collection[str] | None = None,
    heads: int | None = None,
) -> None:
    """Cut the layers of `module` that `plan` (Parts.tensor) names. Every rank of the axis must hold
    the same module, with the same values. No communication: each rank keeps its part.

    If `module` is only a part of the model, `names` are the names of all modules of the model:
    every pattern must match one of them. `heads` must be a multiple of the number of ranks. Raises
    TaskError for a wrong plan. Errors that depend on the order of layers are raised in the first
    forward.
    """
    count = tensor_mesh.size()
    if count == 1:
        return
    chosen = _chosen(plan, {name for name, _ in module.named_modules()}, names, count)
    if heads is not None and heads % count:
        raise TaskError(
            "not-equal-parts", count=count, name="the model", size=heads, what="attention heads"
        )
    layers = dict(module.named_modules())
    _check_not_tied(module, chosen)
    for name, style in chosen.items():
        _check(name, layers[name], style, count)
    _look_at_widths(layers, chosen, count)
    for name, style in chosen.items():
        parallelize_module(
            layers[name], tensor_mesh, _style(layers[name], style), src_data_rank=None
        )


def _chosen(
    plan: Mapping[str, str], here: Collection[str], names: Collection[str] | None, count: int
) -> dict[str, str]:
    """Return the style of each module in `here` that the plan names, by module name."""
    if not plan:
        raise TaskError("tensor-plan-missing", count=count)
    every = here if names is None else names
    found: dict[str, tuple[str, str]] = {}
    for pattern, style in plan.items():
        fitting = [name for name in every if fits(pattern, name)]
        if not fitting:
            near = sorted(difflib.get_close_matches(pattern, filter(None, every), n=3, cutoff=0.4))
            raise TaskError(
                "pattern-fits-nothing",
                pattern=pattern,
                near=near or sorted(filter(None, every))[:8],
            )
        for name in fitting:
            before, its_style = found.setdefault(name, (pattern, style))
            if its_style != style:
                raise TaskError(
                    "pattern-conflict",
                    layer=name,
                    first=before,
                    first_style=its_style,
                    second=pattern,
                    second_style=style,
                )
    if "colwise" in plan.values() and "rowwise" not in plan.values():
        raise TaskError("colwise-without-rowwise")
    return {name: style for name, (_, style) in found.items() if name in here}


def fits(pattern: str, name: str) -> bool:
    """Whether `pattern` matches a module's dotted name. `*` matches any text within one part of the
    name, but no dot.
    """
    asked, given = pattern.split("."), name.split(".")
    return len(asked) == len(given) and all(map(fnmatchcase, given, asked))


def _check(name: str, layer: nn.Module, style: str, count: int) -> None:
    if isinstance(layer, nn.Linear):
        what, size = (
            ("outputs", layer.out_features) if style == "colwise" else ("inputs", layer.in_features)
        )
    elif isinstance(layer, nn.Embedding):
        what, size = (
            ("columns", layer.embedding_dim)
            if style == "colwise"
            else ("rows", layer.num_embeddings)
        )
    else:
        raise TaskError("layer-cannot-be-cut", layer=name, kind=type(layer).__name__)
    if size % count:
        raise TaskError(
            "not-equal-parts", count=count, name=f"{name} ({style})", size=size, what=what
        )


def check_ties(model: nn.Module, plan: Mapping[str, str], count: int) -> None:
    """Check the plan and ties of a whole model before it is cut into stages, because a tie between
    two stages is not visible in either. Raises TaskError like `split_tensors`.
    """
    _check_not_tied(model, _chosen(plan, {name for name, _ in model.named_modules()}, None, count))


def _check_not_tied(module: nn.Module, chosen: Collection[str]) -> None:
    """Raise a TaskError if a layer to be cut shares a parameter with another layer. torch gives the
    cut layer new parameters, which would silently break the tie.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for several in owners.values():
        cut = [name for name in several if name.rpartition(".")[0] in chosen]
        if len(several) > 1 and cut:
            raise TaskError("tied-layers-in-plan", names=" and ".join(several), first=cut[0])


def _style(layer: nn.Module, style: str) -> ParallelStyle:
    if style == "colwise":
        return ColwiseParallel()
    return (
        RowwiseParallel(input_layouts=Replicate())
        if isinstance(layer, nn.Embedding)
        else RowwiseParallel()
    )


# -- the first forward ---------------------------------------------------------------------------


def _look_at_widths(layers: Mapping[str, nn.Module], chosen: Mapping[str, str], count: int) -> None:
    """Make layers check the width of their first input. torch's own error would name neither the
    layer nor the plan.
    """
    for name, layer in layers.items():
        style = chosen.get(name)
        if isinstance(layer, nn.Linear):
            rowwise = style == "rowwise"
            _expect(
                name,
                layer,
                style,
                layer.in_features // count if rowwise else layer.in_features,
                layer.in_features,
            )
        elif isinstance(layer, nn.LayerNorm):
            _expect(name, layer, style, layer.normalized_shape[-1], layer.normalized_shape[-1])


def _expect(name: str, layer: nn.Module, style: str | None, width: int, whole: int) -> None:
    def look(_: nn.Module, given: tuple[object, ...]) -> None:
        handle.remove()
        if (
            not given
            or not isinstance(given[0], Tensor)
            or given[0].dim() == 0
            or given[0].shape[-1] == width
        ):
            return
        got = given[0].shape[-1]
        if style == "rowwise" and got == whole:
            why = "it is rowwise, and the layer before it is not colwise"
        elif style != "rowwise" and got < whole:
            why = "a colwise layer before it gives each rank a share"
        else:
            return  # not caused by the plan: torch raises its own error
        raise TaskError("layer-width-differs", layer=name, width=width, got=got, why=why)

    handle = layer.register_forward_pre_hook(look)
