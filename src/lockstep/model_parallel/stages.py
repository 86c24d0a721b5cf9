"""A stage of a pipeline as a module: some consecutive layers of a model, under the names that
they have in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from lockstep.errors import TaskError
from lockstep.model_parallel.layers import Layers


def stage_module(layers: Layers, part: range) -> nn.Module:
    """A module of these layers only: it takes the model's arguments (the first layers) or one
    tensor, and gives one tensor or the model's output.

    Its parameters and buffers are the model's own, under the names of the whole model. With the
    last layer come those that no layer uses, so that all stages together have every name.
    `layer_names` and `last_class` say in messages what it is.
    """
    assert part.step == 1
    assert 0 <= part.start < part.stop <= len(layers)
    stage = _Chain(layers, part) if layers.graph is None else _traced(layers, layers.graph, part)
    if part.stop == len(layers):
        for name, owner, field in _unused(layers):
            _put(stage, name, owner, field)
    stage.layer_names = layers.names[part.start : part.stop]  # type: ignore[assignment]  # a plain attribute, not a module
    stage.last_class = layers.class_of(part.stop - 1)  # type: ignore[assignment]
    return stage


def joined_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """Several stages' modules in one tree, under the names of the whole model. It is not run."""
    root = nn.Module()
    for stage in stages:
        for prefix, owner in stage.named_modules():
            if prefix and any(
                True for _ in (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
            ):
                _put(root, prefix, owner)
            elif not prefix:
                for field in (*owner._parameters, *owner._buffers):
                    _put(root, field, owner, field)
    return root


def described(module: nn.Module) -> str:
    """ "layers blocks.1 to norm" for a stage's module, for messages."""
    names = getattr(module, "layer_names", ())
    if not names:
        return f"a {type(module).__name__}"
    return f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]} to {names[-1]}"


def check_tensor(output: object, name: str, kind: str) -> Tensor:
    """What a layer gave, if it can go on. Raises TaskError."""
    if isinstance(output, Tensor):
        return output
    inside = (
        f" of {', '.join(type(part).__name__ for part in output)}"
        if isinstance(output, (tuple, list))
        else ""
    )
    raise TaskError(
        "layer-gives-no-tensor", layer=name, kind=kind, what=f"{type(output).__name__}{inside}"
    )


class _Chain(nn.Module):
    """Layers that Parts gave, one applied after the other."""

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
        value: Any = None
        for number, (name, layer) in enumerate(self._chain):
            value = layer(*arguments)
            if number + 1 < len(self._chain):
                arguments = (check_tensor(value, name, type(layer).__name__),)
        return value


def _traced(layers: Layers, whole: fx.Graph, part: range) -> nn.Module:
    """These layers' piece of the graph as a module. fx registers what it calls under its name in
    the model.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            # a parameter of the root: it is where it is used
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    if part.start:
        copies[layers[part.start - 1].nodes[-1]] = graph.placeholder("x")
    else:
        copies.update(
            {node: graph.node_copy(node) for node in whole.nodes if node.op == "placeholder"}
        )
    for number in part:
        for node in layers[number].nodes:
            copies[node] = graph.node_copy(node, copied)
    if part.stop == len(layers):
        output = next(node for node in whole.nodes if node.op == "output")
        graph.output(fx.map_arg(output.args[0], copied))
    else:
        graph.output(copies[layers[part.stop - 1].nodes[-1]])
    graph.lint()
    stage = fx.GraphModule(layers.model, graph, class_name=f"{type(layers.model).__name__}Stage")
    _buffers_as_they_were(stage, layers.model)
    return stage


def _buffers_as_they_were(stage: nn.Module, model: nn.Module) -> None:
    """fx makes every buffer of the root a persistent one."""
    for name, _ in list(stage.named_buffers(recurse=False)):
        if name in model._non_persistent_buffers_set:
            stage._non_persistent_buffers_set.add(name)


def _unused(layers: Layers) -> Iterable[tuple[str, nn.Module, str]]:
    """(dotted name, its owner, its name there) of parameters and buffers that no layer uses,
    such as those of a head for another purpose.
    """
    used = set(_used_names(layers))
    for prefix, owner in layers.model.named_modules(remove_duplicate=False):
        for field in (*owner._parameters, *owner._buffers):
            name = f"{prefix}.{field}" if prefix else field
            if name not in used and getattr(owner, field) is not None:
                yield name, owner, field


def _used_names(layers: Layers) -> Iterable[str]:
    for layer in layers.layers:
        if layer.module is not None:
            yield from _names(layer.name, layer.module)
        for node in layer.nodes:
            for each in (node, *node.all_input_nodes):
                if each.op == "call_module":
                    yield from _names(
                        str(each.target), layers.model.get_submodule(str(each.target))
                    )
                elif each.op == "get_attr":
                    yield str(each.target)


def _names(prefix: str, module: nn.Module) -> Iterable[str]:
    state = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return [f"{prefix}.{name}" for name, _ in state]


def _put(root: nn.Module, name: str, thing: nn.Module, field: str = "") -> None:
    """Register a module, or the parameter or buffer `field` of one, in `root` under a dotted
    name.
    """
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if not field:
        root.add_module(last, thing)
    elif field in thing._parameters:
        root.register_parameter(last, thing._parameters[field])
    else:
        root.register_buffer(
            last, thing._buffers[field], persistent=field not in thing._non_persistent_buffers_set
        )
