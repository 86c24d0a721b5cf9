"""What the rules know about one Python file: its LibCST tree with parents, frames, imports and name
bindings, and its collectives and DistributedDataParallel wrappers.

A name is dotted text: `x`, `self.model`, or `torch.distributed.barrier` with its import resolved.
Nothing is executed. A frame is code that runs as one unit: the module, a function, a class body
or a lambda.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

Loop = cst.For | cst.While
Value = cst.BaseExpression | None
_FRAMES = (cst.Module, cst.FunctionDef, cst.ClassDef, cst.Lambda)
_Node = TypeVar("_Node", bound=cst.CSTNode)


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake at a node. `values` fill in the rule's message in errors.toml; `fix` replaces the
    node, if there is a safe fix.
    """

    node: cst.CSTNode
    values: Mapping[str, object]
    fix: cst.CSTNode | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """A place where a name gets a value. `value` is None if no expression gives it: a parameter,
    a loop, `+=`.
    """

    node: cst.CSTNode
    value: Value


def dotted(node: cst.CSTNode | None) -> str:
    """`a.b.c` for a chain of names, "" for anything else."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=above, attr=cst.Name(value=name)):
            base = dotted(above)
            return f"{base}.{name}" if base else ""
    return ""


def last_name(node: cst.CSTNode | None) -> str:
    """`c` of `a().b.c(...)`; "" for a node without a name."""
    match node:
        case cst.Call(func=cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name))):
            return name
        case cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name)):
            return name
    return ""


def argument(call: cst.Call, name: str, position: int | None = None) -> Value:
    """Return the argument that a call passes for a parameter, by name or by position, or None."""
    by_name = {}
    by_position = {}
    for number, arg in enumerate(call.args):
        if arg.keyword:
            by_name[arg.keyword.value] = arg.value
        else:
            by_position[number] = arg.value
    if name in by_name:
        return by_name[name]
    return None if position is None else by_position.get(position)


def parameter(function: cst.FunctionDef, position: int) -> str:
    """Return the name of the parameter at a position; "" beyond the last."""
    parameters = [*function.params.posonly_params, *function.params.params]
    return parameters[position].name.value if position < len(parameters) else ""


class Script(cst.CSTVisitor):
    """Answers questions about one file."""

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self.module = module
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.frames: dict[cst.CSTNode, cst.CSTNode] = {}
        self.imports: dict[str, set[str]] = defaultdict(set)
        self._path: list[cst.CSTNode] = []
        self._span: dict[cst.CSTNode, tuple[int, int]] = {}
        self._kinds: dict[type, list[Any]] = defaultdict(list)
        self._bound: dict[tuple[cst.CSTNode, str], list[Binding]] = defaultdict(list)
        module.visit(self)
        for node in self._span:
            for name, full in _imported(node):
                self.imports[name].add(full)
            for target, value in _bindings(node):
                name = dotted(target)
                if name:
                    home = self.home(node) if name.startswith("self.") else self.frames[node]
                    self._bound[home, name].append(Binding(node, value))

    def on_visit(self, node: cst.CSTNode) -> bool:
        above = self._path[-1] if self._path else node
        self.parents[node] = above
        self.frames[node] = above if isinstance(above, _FRAMES) else self.frames.get(above, node)
        self._span[node] = (len(self._span), 0)
        self._kinds[type(node)].append(node)
        self._path.append(node)
        return not isinstance(node, cst.SimpleWhitespace)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._path.pop()
        first, _ = self._span[original_node]
        self._span[original_node] = (first, len(self._span))

    def line(self, node: cst.CSTNode) -> int:
        """The first line of a node. The lookup is slow: call it for reported nodes only."""
        return self._positions[node].start.line

    @cached_property
    def _positions(self) -> Mapping[cst.CSTNode, CodeRange]:
        return MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)

    def all(self, kind: type[_Node]) -> list[_Node]:
        return self._kinds.get(kind, [])

    def inside(self, node: cst.CSTNode, root: cst.CSTNode) -> bool:
        first, end = self._span[root]
        return first <= self._span[node][0] < end

    def before(self, node: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Whether `node` begins before `other` in the text."""
        return self._span[node][0] < self._span[other][0]

    def within(self, root: cst.CSTNode, *kinds: type[_Node]) -> Iterator[_Node]:
        """Yield the nodes of these kinds that run when `root` runs, including `root`. The bodies
        of functions and classes in it are left out.
        """
        frame = root if isinstance(root, _FRAMES) else self.frames[root]
        for kind in kinds:
            for node in self.all(kind):
                if self.frames[node] is frame and self.inside(node, root):
                    yield node

    def calls(self, root: cst.CSTNode, *names: str) -> list[cst.Call]:
        """The calls that run when `root` runs: all calls, or the calls with these last names."""
        calls = self.within(root, cst.Call)
        return [call for call in calls if not names or last_name(call) in names]

    def names(self, root: cst.CSTNode) -> set[str]:
        """Every dotted name in an expression, with its prefixes: `self.x.y` gives self, self.x,
        self.x.y.
        """
        chains = self.within(root, cst.Name, cst.Attribute)
        return {dotted(node) for node in chains if not self._is_part(node)}

    def _is_part(self, node: cst.CSTNode) -> bool:
        """Whether a node is the b of `a.b`, or of `f(b=1)`."""
        above = self.parents[node]
        return node in (getattr(above, "attr", None), getattr(above, "keyword", None))

    def ancestors(self, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
        """Yield pairs (above, below) up to the frame that `node` runs in. `below` is the child of
        `above` that is or contains `node`.
        """
        frame = self.frames[node]
        while node is not frame:
            yield self.parents[node], node
            node = self.parents[node]

    def scope(self, node: cst.CSTNode) -> cst.CSTNode:
        """The function that `node` is in, or the module."""
        return self._around(self.frames[node], cst.FunctionDef)

    def home(self, node: cst.CSTNode) -> cst.CSTNode:
        """The class that `node` is in, or the module."""
        return self._around(node, cst.ClassDef)

    def _around(self, node: cst.CSTNode, kind: type[cst.CSTNode]) -> cst.CSTNode:
        while not isinstance(node, (kind, cst.Module)):
            node = self.frames[node]
        return node

    def loops(self, node: cst.CSTNode) -> list[Loop]:
        """The loops that repeat `node`, the innermost first."""
        loops: list[Loop] = []
        for above, below in self.ancestors(node):
            if isinstance(above, Loop) and below is above.body:
                loops.append(above)
        return loops

    def lookup(self, name: str, node: cst.CSTNode) -> list[Binding]:
        """The bindings of a name that is used at `node`, in the order of lines: those in the
        innermost function that binds it, else in the module. For `self.x`: those in the class.
        """
        if name.startswith("self."):
            return self._bound.get((self.home(node), name), [])
        bindings: list[Binding] = []
        while not bindings and not isinstance(node, cst.Module):
            node = self.scope(node)
            bindings = self._bound.get((node, name), [])
        return bindings

    def same(self, name: str, node: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Whether a name has the same bindings at both nodes."""
        return bool(name) and self.lookup(name, node) == self.lookup(name, other)

    def assigned(self, value: cst.BaseExpression) -> str:
        """The name that a value is assigned to; "" for no name or several."""
        match self.parents[value]:
            case cst.Assign(targets=[cst.AssignTarget(target=target)]):
                return dotted(target)
        return ""

    def name(self, node: cst.CSTNode | None) -> str:
        """The dotted name with its import resolved; "" for a node without a name, and for a name
        that is imported from several places.
        """
        first, dot, rest = dotted(node).partition(".")
        homes = self.imports.get(first, {"torch.distributed"} if first == "dist" else {first})
        if len(homes) != 1:
            return ""
        (home,) = homes
        return f"{home}{dot}{rest}"

    def text(self, node: cst.CSTNode | None) -> str:
        """The source of a node in one line, without the parentheses around it; "" for None."""
        if node is None:
            return ""
        text = " ".join(self.module.code_for_node(node).split())
        for _ in getattr(node, "lpar", ()):
            text = text[1:-1].strip()
        return text

    def functions(self, name: str) -> list[cst.FunctionDef]:
        """The functions and methods of this name in the file."""
        return [node for node in self.all(cst.FunctionDef) if node.name.value == name]

    def called(self, call: cst.Call) -> cst.FunctionDef | None:
        """The function of this file that `name(...)` calls, if only one function has the name."""
        functions = []
        for function in self.functions(dotted(call.func)):
            if not isinstance(self.frames[function], cst.ClassDef):
                functions.append(function)
        return functions[0] if len(functions) == 1 else None


def _imported(node: cst.CSTNode) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, with the full name of what it stands for."""
    match node:
        case cst.Import():
            for alias in node.names:
                full = alias.evaluated_name
                top = full.split(".")[0]
                yield (alias.evaluated_alias, full) if alias.evaluated_alias else (top, top)
        case cst.ImportFrom(names=cst.ImportStar()):
            yield "*", dotted(node.module)
        case cst.ImportFrom(names=[*aliases]):
            module = "." * len(node.relative) + dotted(node.module)
            for alias in aliases:
                name = alias.evaluated_name
                yield alias.evaluated_alias or name, f"{module}.{name}"


def _bindings(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, Value]]:
    match node:
        case cst.Assign():
            for assigned in node.targets:
                yield from _unpacked(assigned.target, node.value)
        case cst.AnnAssign() | cst.NamedExpr():
            yield node.target, node.value
        case cst.AugAssign() | cst.For() | cst.CompFor():
            yield from _unpacked(node.target, None)
        case cst.WithItem(asname=cst.AsName(name=target)):
            yield from _unpacked(target, node.item)
        case cst.Param():
            yield node.name, None


def _unpacked(target: cst.CSTNode, value: Value) -> Iterator[tuple[cst.CSTNode, Value]]:
    if not isinstance(target, (cst.Tuple, cst.List)):
        yield target, value
        return
    values: list[Value] = [None] * len(target.elements)
    if isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(values):
        values = [element.value for element in value.elements]
    for part, part_value in zip(target.elements, values, strict=True):
        yield from _unpacked(part.value, part_value)


_GROUP = {
    "barrier": 0,
    "monitored_barrier": 0,
    "all_reduce": 2,
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_to_all": 2,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
    "scatter_object_list": 3,
    "all_to_all_single": 4,
}
"""The position of `group` among the arguments, by collective."""
_TORCH = re.compile(r"torch\.distributed\.(distributed_c10d\.)?(?P<last>\w+)")
_LOCKSTEP = re.compile(r"lockstep\.(evaluate|train|collectives\.(all_reduce|broadcast|all_gather))")
_WORLDS = ("lockstep.init", "lockstep.World.current", "lockstep.World", "lockstep.world.World")
_WORLD = ("barrier", "agree", "mean", "subgroup")
_WRAPPERS = ("DistributedDataParallel", "DDP")


def collective(script: Script, call: cst.Call) -> str:
    """Return the name, for messages, of a call that every rank must make. Return "" for other
    calls, and for a collective of a group.
    """
    name = script.name(call.func)
    last = last_name(call)
    if _LOCKSTEP.fullmatch(name):
        return "" if _of_a_group(script, call, 4) else name
    if _TORCH.fullmatch(name) and last in _GROUP:
        return "" if _of_a_group(script, call, _GROUP[last]) else f"dist.{last}"
    if last == "wait_for_everyone" and isinstance(call.func, cst.Attribute):
        return last
    if (
        last in _WORLD
        and isinstance(call.func, cst.Attribute)
        and _is_world(script, call.func.value)
    ):
        return f"world.{last}"
    return ""


def _of_a_group(script: Script, call: cst.Call, position: int) -> bool:
    return not re.fullmatch(r"|None|(.*\.)?WORLD", script.text(argument(call, "group", position)))


def _is_world(script: Script, node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Call):
        return script.name(node.func) in _WORLDS
    for binding in script.lookup(dotted(node), node):
        match binding.value, binding.node:
            case (cst.Call(func=kind), _) | (_, cst.Param(annotation=cst.Annotation(kind))):
                return script.name(kind) in _WORLDS
    return False


def is_torch_class(script: Script, node: cst.CSTNode, names: Collection[str]) -> bool:
    """Whether a node names one of these classes of torch (or apex), also by a star import from a
    module of torch.
    """
    full = script.name(node)
    if full.rpartition(".")[2] not in names:
        return False
    homes: Collection[str] = ()
    if dotted(node).split(".")[0] in script.imports:
        homes = {full}
    elif "." not in full:
        homes = script.imports.get("*", ())
    return any(re.match(r"(torch|apex)\b", home) for home in homes)


def wrapper(script: Script, node: cst.CSTNode, use: cst.CSTNode) -> cst.Call | None:
    """Return the call of torch's or Lockstep's DistributedDataParallel that a name at `use` is
    bound to.
    """
    bindings = script.lookup(dotted(node), use)
    if not dotted(node).startswith("self."):
        bindings = [binding for binding in bindings if _is_before(script, binding.node, use)]
    if not bindings:
        return None
    value = bindings[-1].value
    for call in (value.body, value.orelse) if isinstance(value, cst.IfExp) else (value,):
        if not isinstance(call, cst.Call):
            continue
        if _is_lockstep(script, call) or is_torch_class(script, call.func, _WRAPPERS):
            return call
    return None


def _is_before(script: Script, node: cst.CSTNode, use: cst.CSTNode) -> bool:
    return script.before(node, use) or script.scope(node) is not script.scope(use)


def _is_lockstep(script: Script, call: cst.Call) -> bool:
    return re.fullmatch(r"lockstep\..*DistributedDataParallel", script.name(call.func)) is not None


def is_torch_wrapper(script: Script, node: cst.CSTNode, use: cst.CSTNode) -> bool:
    """Whether a name at `use` is certainly torch's DistributedDataParallel."""
    for binding in script.lookup(dotted(node), use):
        if isinstance(binding.value, cst.Call) and _is_lockstep(script, binding.value):
            return False
    return wrapper(script, node, use) is not None


def without_gradients(script: Script, node: cst.CSTNode) -> bool:
    """Whether a line is under torch.no_grad(), inference_mode() or set_grad_enabled(), except
    set_grad_enabled(True), in a with block or by a decorator.
    """
    around = list(getattr(script.scope(node), "decorators", ()))
    for above, _ in script.ancestors(node):
        if isinstance(above, cst.With):
            around += above.items
    words = r"no_grad|inference_mode|set_grad_enabled(?!\((mode\s*=\s*)?True\))"
    return any(re.search(words, script.text(context)) for context in around)
