"""Tensor parallelism: the matrices of some layers cut over the ranks of the tensor axis, by torch's
DTensor.

    colwise   a rank computes some of a layer's outputs            whole input -> a share of the output, nothing sent
    rowwise   a rank computes with some of a layer's inputs        a share of the input -> the whole output: one all-reduce

In pairs (colwise, something elementwise or one attention head after the other, rowwise) they cost
one all-reduce a forward and one a backward (Shoeybi et al., Megatron-LM, 2019, section 3).
Everything else is held and computed alike by all ranks of the axis.
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
    """Cut the layers of `module` that `plan` (Parts.tensor) names. Every rank of the axis holds the
    same module, with the same values.

    `names` are all modules of the whole model, where `module` is only some of its layers: every
    pattern must fit one of them. `heads` attention heads must be shared out whole. Nothing is sent:
    each rank keeps its part of what it has. A wrong plan (TaskError) is found here or, where it
    depends on which layer comes after which, in the first forward.
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
    """Style by the name of a module that is here."""
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
    """Whether the name of a module is meant: `*` stands for one part of it, or for some of one
    part.
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
    """Of a whole model, before it is cut into stages: each of these sees only its own. Raises
    TaskError as `split_tensors`.
    """
    _check_not_tied(model, _chosen(plan, {name for name, _ in model.named_modules()}, None, count))


def _check_not_tied(module: nn.Module, chosen: Collection[str]) -> None:
    """torch gives a layer that it cuts new parameters, and a tie with another layer would break
    without a word.
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
    """Have layers look at the width of what they are given first: torch's own complaint would
    name neither the layer nor the plan.
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
            return  # none of ours: torch says what it thinks of it
        raise TaskError("layer-width-differs", layer=name, width=width, got=got, why=why)

    handle = layer.register_forward_pre_hook(look)
