"""A stage of a pipeline as a module: some consecutive layers of a model, under their names in the
whole model. Also the shapes that are sent from stage to stage.

Every rank needs receive buffers of the right size, and must not unpickle messages to find it. So
each stage runs once, one after the other, without gradients: the first on real input, the others on
zeros. Each sends the shape of its output, or its error, to all ranks in JSON. After an error all
ranks raise, so that no rank waits for a message that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lockstep.collectives.broadcast_json import said_by
from lockstep.collectives.group import Group
from lockstep.errors import PeerFailed, TaskError
from lockstep.model_parallel.layers import Layers
from lockstep.runtime import randomness


def stage_module(layers: Layers, part: range) -> nn.Module:
    """Return a module of these layers. It takes the model's arguments if it has the first layer,
    else one tensor. It returns the model's output if it has the last layer, else one tensor.

    Its parameters and buffers are the model's own, under the names of the whole model. The stage
    with the last layer also holds those that no layer uses, so that all stages together have every
    name. Its attributes `layer_names` and `last_class` describe it in messages.
    """
    assert part.step == 1
    assert 0 <= part.start < part.stop <= len(layers)
    stage = _Chain(layers, part) if layers.graph is None else _traced(layers, layers.graph, part)
    if part.stop == len(layers):
        for name, owner, field in _unused(layers):
            _put(stage, name, owner, field)
    # the ignores: these are plain attributes, not modules
    stage.layer_names = layers.names[part.start : part.stop]  # type: ignore[assignment]
    stage.last_class = layers.class_of(part.stop - 1)  # type: ignore[assignment]
    return stage


def joined_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """Join several stages in one tree, under the names of the whole model. It cannot be run."""
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
    """Return a stage's layers for messages, such as "layers blocks.1 to norm"."""
    names = getattr(module, "layer_names", ())
    if not names:
        return f"a {type(module).__name__}"
    return f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]} to {names[-1]}"


def check_tensor(output: object, name: str, kind: str) -> Tensor:
    """Return a layer's output. Raises TaskError if it is not a tensor."""
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
        value: Any = None
        for number, (name, layer) in enumerate(self._chain):
            value = layer(*arguments)
            if number + 1 < len(self._chain):
                arguments = (check_tensor(value, name, type(layer).__name__),)
        return value


def _traced(layers: Layers, whole: fx.Graph, part: range) -> nn.Module:
    """Return the part of the graph for these layers as a module. fx registers the modules that it
    calls under their names in the model.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            # copy a parameter of the root at its first use
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
    """Restore which buffers of the root are not persistent: fx makes all of them persistent."""
    for name, _ in list(stage.named_buffers(recurse=False)):
        if name in model._non_persistent_buffers_set:
            stage._non_persistent_buffers_set.add(name)


def _unused(layers: Layers) -> Iterable[tuple[str, nn.Module, str]]:
    """Yield (dotted name, owner, name in the owner) for parameters and buffers that no layer uses,
    such as those of a second head.
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


# what torch's modules raise for a shape that they do not accept
_MISFIT = (RuntimeError, ValueError, IndexError)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @property
    def differentiable(self) -> bool:
        """Whether a gradient is sent back for it: for every dtype that can have one, even if no
        parameter needs it, because frozen parameters may be unfrozen.
        """
        return self.dtype.is_floating_point or self.dtype.is_complex

    def example(self) -> Tensor:
        """Return a meta tensor of this shape and dtype, which takes no memory."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.differentiable
        )


def signature(arguments: Any) -> Any:
    """Return a key that is equal for arguments of equal structure, shapes, dtypes and constants."""
    if isinstance(arguments, Tensor):
        return Shape.of(arguments)
    if isinstance(arguments, (tuple, list)):
        return type(arguments).__name__, *map(signature, arguments)
    if isinstance(arguments, Mapping):
        return "mapping", *((name, signature(value)) for name, value in arguments.items())
    return type(arguments).__name__, (
        repr(arguments) if isinstance(arguments, (int, float, str, bool, type(None))) else ""
    )


def between(
    stages: Mapping[int, nn.Module],
    count: int,
    group: Group,
    device: torch.device,
    arguments: Sequence[Any],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> list[Shape]:
    """Return the output shapes of stages 0 .. count-2 for a micro-batch like `arguments`. Stage s
    is on rank s modulo the number of ranks. Collective.

    Random states and buffers do not change. Raises TaskError on all ranks if the output of a stage
    is no tensor or does not fit the next stage. If a stage raises another exception, its own rank
    raises that, and the other ranks raise PeerFailed.
    """
    found: list[Shape] = []
    who: list[str] = []
    for number in range(count):
        problem: Exception | None = None
        said: dict[str, Any] = {}
        if number in stages:
            arriving = found[-1] if found else None
            try:
                output = _tried(
                    stages[number],
                    arguments if arriving is None else _zeros(arriving, device),
                    autocast,
                )
                said = _what_it_gave(stages[number], output, number, count)
            except Exception as error:
                problem = error
                said = _what_went_wrong(stages[number], error, number, arriving, who)
        said = said_by(number % group.size, said, group.host, "for the shapes between stages")
        if "problem" in said:
            _fail(said, problem, number % group.size)
        who.append(said["who"])
        if number + 1 < count:
            found.append(Shape(tuple(said["shape"]), getattr(torch, said["dtype"])))
    return found


def _zeros(arriving: Shape, device: torch.device) -> tuple[Tensor]:
    return (torch.zeros(arriving.shape, dtype=arriving.dtype, device=device),)


def _tried(
    stage: nn.Module, arguments: Sequence[Any], autocast: Callable[[], AbstractContextManager[Any]]
) -> Any:
    # run on copies of the buffers, because BatchNorm changes them
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    with torch.no_grad(), randomness.preserved(devices=True), autocast():
        return torch.func.functional_call(stage, buffers, tuple(arguments))


def _what_it_gave(stage: nn.Module, output: Any, number: int, count: int) -> dict[str, Any]:
    said: dict[str, Any] = {"who": described(stage)}
    if number + 1 < count:
        tensor = check_tensor(output, *last_layer(stage, number))
        said |= {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    return said


def last_layer(stage: nn.Module, number: int) -> tuple[str, str]:
    """Return the name and the class of a stage's last layer, for messages."""
    names = getattr(stage, "layer_names", (f"stage {number}",))
    return names[-1], getattr(stage, "last_class", type(stage).__name__)


def _what_went_wrong(
    stage: nn.Module, error: Exception, number: int, arriving: Shape | None, who: Sequence[str]
) -> dict[str, Any]:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, TaskError):
        return {"problem": reason, "everybodys": True}
    here = f"stage {number} ({described(stage)})"
    if arriving is None or type(error) not in _MISFIT:
        return {"problem": f"{here} raised {type(error).__name__}: {reason}", "everybodys": False}
    problem = TaskError(
        "stages-do-not-fit",
        stage=here,
        before=f"stage {number - 1} ({who[-1]})",
        gives=str(arriving),
        reason=reason,
    )
    return {"problem": str(problem), "everybodys": True}


def _fail(said: dict[str, Any], problem: Exception | None, rank: int) -> None:
    if said["everybodys"]:
        raise TaskError(said["problem"]) from problem
    if problem is not None:
        raise problem
    raise PeerFailed("pipeline-rank-failed", rank=rank, problem=said["problem"])
