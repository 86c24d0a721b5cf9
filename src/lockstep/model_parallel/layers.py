"""Divide a model into consecutive layers. A cut is possible where exactly one tensor passes from
the operations before it to those after it.

torch.fx traces the forward; it enters nn.Sequential, but no other module. The cuts are where only
one value is live:

    text -> bytes ──┐
         -> positions ── + ─|─ blocks.0 ─|─ blocks.1 ─|─ norm ─|─ head          | may be cut

A residual connection around several modules allows no cut between them. Operations without a module
(an addition) belong to the layer before them; at the beginning of the model, to the first layer. If
torch.fx cannot trace a forward, `Parts(layers=...)` must list the modules.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx, nn

from lockstep.config.parts import Parts
from lockstep.errors import TaskError

_NO_TENSOR = ("size", "dim", "numel", "stride", "element_size")


@dataclass(frozen=True, slots=True)
class CutLayer:
    """The part of a model between two neighbouring cuts."""

    name: str
    """The dotted name of the first module in it. At a module's second call, ":2" is appended."""
    nodes: tuple[fx.Node, ...] = ()
    """Its part of the graph, if the forward was traced. The last node is the tensor that passes to
    the next layer.
    """
    module: nn.Module | None = None
    """The module, if Parts listed the layers."""


@dataclass(frozen=True, slots=True)
class Layers(Sequence[CutLayer]):
    """The layers of a model, in order. They hold the model's own modules and parameters, not
    copies.
    """

    model: nn.Module
    layers: tuple[CutLayer, ...]
    graph: fx.Graph | None = None
    """The graph of the forward; None if Parts listed the layers."""

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> CutLayer:  # type: ignore[override]  # no slices
        return self.layers[index]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)


def layers_of(model: nn.Module, parts: Parts | None = None, arguments: int | None = None) -> Layers:
    """Return the layers of `model`. `arguments`: the number of positional arguments of a call;
    None: only those without a default.

    Raises TaskError if the forward cannot be traced, or if `parts.layers` are not modules of the
    model.
    """
    if parts is not None and parts.layers is not None:
        return Layers(model, tuple(_listed(model, parts.layers)))
    graph = _traced(model, arguments)
    pieces = _joined(_between_cuts(graph))
    return Layers(model, tuple(_named(pieces)), graph)


def _listed(
    model: nn.Module, layers: Callable[[nn.Module], Sequence[nn.Module]]
) -> Iterator[CutLayer]:
    """Yield the layers that Parts lists."""
    names = {module: name for name, module in model.named_modules()}
    listed = set()
    for number, module in enumerate(layers(model)):
        if not isinstance(module, nn.Module) or not names.get(module):
            raise TaskError(
                "not-a-layer", number=number, what=type(module).__name__, model=type(model).__name__
            )
        if module in listed:
            raise TaskError("layer-given-twice", layer=names[module])
        listed.add(module)
        yield CutLayer(names[module], module=module)


class _Tracer(fx.Tracer):
    """Traces into nn.Sequential only, so that other modules still react to train() and eval()."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return type(module).forward is not nn.Sequential.forward


def _traced(model: nn.Module, arguments: int | None) -> fx.Graph:
    """Return the graph of the forward. Raises TaskError if it differs between training and
    evaluation, because one graph cannot represent both.
    """
    training = model.training
    try:
        model.training = True  # of the root only: tracing calls no other forward that reads it
        graph = _graph(model, arguments)
        model.training = False
        evaluating = _graph(model, arguments)
    finally:
        model.training = training
    if str(graph) != str(evaluating):
        raise TaskError("forward-depends-on-mode", model=type(model).__name__)
    return graph


def _graph(model: nn.Module, arguments: int | None) -> fx.Graph:
    fixed = {}
    for number, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        passed = arguments is not None and number < arguments
        if parameter.kind is parameter.KEYWORD_ONLY:
            passed = False
        if not passed and parameter.default is not parameter.empty:
            fixed[parameter.name] = parameter.default
    try:
        with warnings.catch_warnings():
            # fx warns that it could not add an assertion; `_without` removes assertions anyway
            warnings.simplefilter("ignore")
            graph = _Tracer().trace(model, concrete_args=fixed or None)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TaskError(
            "forward-not-followed", model=type(model).__name__, reason=reason
        ) from error
    _without(graph, fixed)
    for node in list(graph.nodes):
        # `out, state = lstm(x)` has a node for the state even if nothing uses it
        if not node.users and _name(node) in ("getitem", "getattr"):
            graph.erase_node(node)
    return graph


def _without(graph: fx.Graph, fixed: dict[str, object]) -> None:
    """Remove arguments that keep their defaults, and the nodes with which fx checks them."""
    renamed = {f"{name}_1" for name in fixed}
    for argument in [node for node in graph.nodes if node.op == "placeholder"]:
        if argument.target.lstrip("*") in fixed or argument.target in renamed:
            needless = [argument]
            for node in needless:
                needless += [user for user in node.users if user not in needless]
            for node in sorted(needless, reverse=True):
                graph.erase_node(node)


def _between_cuts(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the graph's nodes in pieces, which end where only one tensor is live. Parameters of
    the root are in no piece: each stage adds those that it uses.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    last_use = {}
    for node in graph.nodes:
        last_use[node] = max((order[user] for user in node.users), default=-1)
    alive = set()
    piece = []
    for node in graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        alive.add(node)
        alive = {earlier for earlier in alive if last_use[earlier] > order[node]}
        if node.op == "placeholder":
            continue
        piece.append(node)
        if alive == {node} and _may_be_a_tensor(node):
            yield piece
            piece = []
    if piece:
        yield piece


def _may_be_a_tensor(node: fx.Node) -> bool:
    """Whether a node's value may be a tensor. It is not a shape, and no node indexes it with a
    number or a name, as one does with tuples and dicts.
    """
    if node.op == "call_function" and node.target is getattr:
        return False
    if node.op == "call_method" and node.target in _NO_TENSOR:
        return False
    keys = [user.args[1] for user in node.users if _name(user) == "getitem"]
    return not any(isinstance(key, (int, str)) for key in keys)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def _joined(pieces: Iterator[list[fx.Node]]) -> list[list[fx.Node]]:
    """Join each piece that calls no module to the piece before it; at the beginning, to the first
    piece that calls one.
    """
    layers = []
    waiting: list[fx.Node] = []
    for piece in pieces:
        if any(node.op == "call_module" for node in piece):
            layers.append(waiting + piece)
            waiting = []
        elif layers:
            layers[-1] += piece
        else:
            waiting += piece
    return layers


def _named(pieces: list[list[fx.Node]]) -> Iterator[CutLayer]:
    calls: dict[str, int] = {}
    for piece in pieces:
        name = next(str(node.target) for node in piece if node.op == "call_module")
        calls[name] = calls.get(name, 0) + 1
        if calls[name] > 1:
            name = f"{name}:{calls[name]}"
        yield CutLayer(name, nodes=tuple(piece))
