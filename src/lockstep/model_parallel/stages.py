"""A stage of a pipeline as a module: some consecutive layers of a model, under their names in the
whole model. Also the shapes that are sent from stage to stage.

Every rank needs receive buffers of the right size, and must not unpickle messages to find it. So
each stage runs once, one after the other, without gradients: the first on real input, the others on
zeros. Each sends the shape of its output to all ranks in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from lockstep.collectives.broadcast_json import said_by
from lockstep.collectives.group import Group
from lockstep.collectives.plain_json import dtype_name
from lockstep.errors import TaskError
from lockstep.model_parallel.layers import Layers
from lockstep.runtime import randomness


def stage_module(layers: Layers, part: range) -> nn.Module:
    """Return a module of these layers. It takes the model's arguments if it has the first layer,
    else one tensor. It returns the model's output if it has the last layer, else one tensor.

    Its parameters and buffers are the model's own, under the names of the whole model. The stage
    with the last layer also holds those that no layer uses, so that all stages together have every
    name. Its attribute `layer_names` describes it in messages.
    """
    assert part.step == 1
    assert 0 <= part.start < part.stop <= len(layers)
    stage = _cut(layers, part)
    if part.stop == len(layers):
        for name, owner, field in _unused(layers):
            _put(stage, name, owner, field)
    # the ignore: this is a plain attribute, not a module
    stage.layer_names = layers.names[part.start : part.stop]  # type: ignore[assignment]
    return stage


def described(stage: nn.Module) -> str:
    """Return a stage's layers for messages, such as "layers blocks.1 to norm"."""
    names = getattr(stage, "layer_names", (type(stage).__name__,))
    if len(names) == 1:
        return f"layer {names[0]}"
    return f"layers {names[0]} to {names[-1]}"


def check_tensor(output: object, layer: str) -> Tensor:
    """Return a layer's output. Raises TaskError if it is not a tensor."""
    if isinstance(output, Tensor):
        return output
    raise TaskError("layer-gives-no-tensor", layer=layer, what=type(output).__name__)


def _cut(layers: Layers, part: range) -> nn.Module:
    if layers.graph is None:
        return _Chain(layers, part)
    return _traced(layers, layers.graph, part)


class _Chain(nn.Module):
    """The layers that Parts lists, applied one after the other."""

    def __init__(self, layers: Layers, part: range) -> None:
        super().__init__()
        self.training = layers.model.training
        # a plain list: the modules are registered under their own names
        self._chain: list[tuple[str, Callable[..., Any]]] = []
        for number in part:
            layer = layers[number]
            assert layer.module is not None
            _put(self, layer.name, layer.module)
            self._chain.append((layer.name, layer.module))

    def forward(self, *arguments: Any) -> Any:
        (before, first), *others = self._chain
        value = first(*arguments)
        for name, layer in others:
            value = layer(check_tensor(value, f"layer {before}"))
            before = name
        return value


def _traced(layers: Layers, model_graph: fx.Graph, part: range) -> nn.Module:
    """Return the part of the graph for these layers as a module. fx registers the modules that it
    calls under their names in the model.
    """
    graph = fx.Graph()
    copies = {}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            # copy a parameter of the root at its first use
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    if part.start:
        copies[layers[part.start - 1].nodes[-1]] = graph.placeholder("x")
    else:
        for node in model_graph.nodes:
            if node.op == "placeholder":
                copies[node] = graph.node_copy(node)
    for number in part:
        for node in layers[number].nodes:
            copies[node] = graph.node_copy(node, copied)
    if part.stop == len(layers):
        output = next(node for node in model_graph.nodes if node.op == "output")
        graph.output(fx.map_arg(output.args[0], copied))
    else:
        graph.output(copies[layers[part.stop - 1].nodes[-1]])
    graph.lint()
    stage = fx.GraphModule(layers.model, graph, class_name=f"{type(layers.model).__name__}Stage")
    for name, _ in stage.named_buffers(recurse=False):
        # fx makes all buffers of the root persistent
        if name in layers.model._non_persistent_buffers_set:
            stage._non_persistent_buffers_set.add(name)
    return stage


def _unused(layers: Layers) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (dotted name, owner, name in the owner) for parameters and buffers that no layer uses,
    such as those of a second head.
    """
    stage = _cut(layers, range(len(layers)))
    used = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
    used |= {name for name, _ in stage.named_buffers(remove_duplicate=False)}
    for prefix, owner in layers.model.named_modules(remove_duplicate=False):
        for field in (*owner._parameters, *owner._buffers):
            name = f"{prefix}.{field}" if prefix else field
            if name not in used and getattr(owner, field) is not None:
                yield name, owner, field


def _put(root: nn.Module, name: str, module: nn.Module, field: str = "") -> None:
    """Register a module, or the parameter or buffer `field` of one, in `root` under a dotted
    name.
    """
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if not field:
        root.add_module(last, module)
    elif field in module._parameters:
        root.register_parameter(last, module._parameters[field])
    else:
        persistent = field not in module._non_persistent_buffers_set
        root.register_buffer(last, module._buffers[field], persistent)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"

    def example(self) -> Tensor:
        """Return a meta tensor of this shape and dtype, which takes no memory.

        It requires a gradient if its dtype can have one, even if no parameter needs it: frozen
        parameters may be unfrozen.
        """
        differentiable = self.dtype.is_floating_point or self.dtype.is_complex
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=differentiable
        )


def signature(arguments: Any) -> tuple[Any, ...]:
    """Return a key that is equal for arguments of equal structure, shapes, dtypes and constants."""
    leaves, structure = tree_flatten(arguments)
    return str(structure), *map(_leaf, leaves)


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape.of(value)
    constant = isinstance(value, (int, float, str, bool, type(None)))
    if constant:
        return repr(value)
    return type(value).__name__


def shapes_between(
    stage: nn.Module,
    group: Group,
    device: torch.device,
    arguments: Sequence[Any],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> list[Shape]:
    """Return the output shapes of all stages but the last, for a micro-batch like `arguments`.
    Stage s is on rank s. Collective.

    Random states and buffers do not change. An exception of a stage is raised on its rank, with a
    note about the stage; the other ranks wait until the timeout of their process group.
    """
    shapes: list[Shape] = []
    for rank in range(group.size - 1):
        message: tuple[Sequence[int], str] = (), ""
        if rank == group.rank:
            if shapes:
                received = shapes[-1]
                arguments = (torch.zeros(received.shape, dtype=received.dtype, device=device),)
            try:
                tensor = check_tensor(_output(stage, arguments, autocast), described(stage))
            except Exception as error:
                takes = f", on {shapes[-1]} of the stage before" if shapes else ""
                error.add_note(f"In stage {rank} of the pipeline ({described(stage)}){takes}.")
                raise
            message = tuple(tensor.shape), dtype_name(tensor.dtype)
        shape, dtype = said_by(rank, message, group.host, "for the shapes between stages")
        shapes.append(Shape(tuple(shape), getattr(torch, dtype)))
    return shapes


def _output(
    stage: nn.Module, arguments: Sequence[Any], autocast: Callable[[], AbstractContextManager[Any]]
) -> Any:
    # run on copies of the buffers, because BatchNorm changes them
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    with torch.no_grad(), randomness.preserved(devices=True), autocast():
        return torch.func.functional_call(stage, buffers, tuple(arguments))
