"""What the rules know about one Python file: its syntax tree with parents, frames, imports and name
bindings.

A name is dotted text: `x`, `self.model`, or `torch.distributed.barrier` with its import resolved.
Nothing is executed. A frame is code that runs as one unit: the module, a function, a class body
or a lambda.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
With = ast.With | ast.AsyncWith
Value = ast.expr | None
Code = ast.AST | list[ast.stmt]
_FRAMES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_Node = TypeVar("_Node", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake at a node. `values` fill in the rule's message in errors.toml; `fix` is the text
    that replaces the node, if there is a safe fix.
    """

    node: ast.expr | ast.stmt
    values: Mapping[str, object]
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """A line where a name gets a value. `value` is None if no expression gives it: a parameter,
    a loop, `+=`.
    """

    node: ast.AST
    value: Value


def dotted(node: ast.AST | None) -> str:
    """`a.b.c` for a chain of names, "" for anything else."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(above, name):
            base = dotted(above)
            return f"{base}.{name}" if base else ""
    return ""


def last_name(node: ast.AST | None) -> str:
    """`c` of `a().b.c(...)`; "" for a node without a name."""
    match node:
        case ast.Call(ast.Name(name) | ast.Attribute(_, name)):
            return name
        case ast.Name(name) | ast.Attribute(_, name):
            return name
    return ""


def arguments(call: ast.Call) -> dict[int | str | None, ast.expr]:
    """The arguments of a call, by position and by name."""
    passed: dict[int | str | None, ast.expr] = {}
    passed.update(enumerate(call.args))
    for keyword in call.keywords:
        passed[keyword.arg] = keyword.value
    return passed


def argument(call: ast.Call, name: str, position: int = -1) -> Value:
    """Return the argument that a call passes for a parameter, by name or by position, or None."""
    passed = arguments(call)
    return passed.get(name, passed.get(position))


def parameter(function: Function, key: int | str | None) -> str:
    """Return the name of the parameter that an argument is for; "" beyond the last."""
    if not isinstance(key, int):
        return key or ""
    names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    return names[key] if key < len(names) else ""


def of_epochs(loop: Loop) -> bool:
    """Whether a loop counts epochs, by the name of its variable."""
    target = dotted(loop.target) if isinstance(loop, ast.For) else ""
    return re.fullmatch(r"_?ep(och)?(_\w+)?", target) is not None


class Script:
    """Answers questions about one file."""

    def __init__(self, tree: ast.Module, source: str) -> None:
        self.source = source
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.frames: dict[ast.AST, ast.AST] = {}
        self.imports: dict[str, set[str]] = defaultdict(set)
        self.functions: dict[str, list[Function]] = defaultdict(list)
        """The functions and methods of each name in the file."""
        self._span: dict[ast.AST, tuple[int, int]] = {}
        self._texts: dict[ast.AST, str] = {}
        self._bound: dict[tuple[ast.AST, str], list[Binding]] = defaultdict(list)
        self._add(tree, tree, tree)
        for node in self.nodes:
            if isinstance(node, Function):
                self.functions[node.name].append(node)
            for name, full in _imported(node):
                self.imports[name].add(full)
            for name, value in _bindings(node):
                if not name:
                    continue
                home = self.home(node) if name.startswith("self.") else self.frames[node]
                self._bound[home, name].append(Binding(node, value))

    def _add(self, node: ast.AST, parent: ast.AST, frame: ast.AST) -> None:
        first = len(self.nodes)
        self.nodes.append(node)
        self.parents[node] = parent
        self.frames[node] = frame
        for child in ast.iter_child_nodes(node):
            self._add(child, node, node if isinstance(node, _FRAMES) else frame)
        self._span[node] = (first, len(self.nodes))

    def all(self, kind: type[_Node]) -> list[_Node]:
        return [node for node in self.nodes if isinstance(node, kind)]

    def inside(self, node: ast.AST, root: ast.AST) -> bool:
        first, end = self._span[root]
        return first <= self._span[node][0] < end

    def before(self, node: ast.AST, other: ast.AST) -> bool:
        """Whether `node` begins before `other` in the text."""
        return self._span[node][0] < self._span[other][0]

    def within(self, root: Code, kind: type[_Node]) -> Iterator[_Node]:
        """Yield the nodes of this kind that run when `root` runs, including `root`. The bodies of
        functions and classes in it are left out.
        """
        for part in root if isinstance(root, list) else [root]:
            frame = root if isinstance(root, _FRAMES) else self.frames[part]
            first, end = self._span[part]
            for node in self.nodes[first:end]:
                if isinstance(node, kind) and self.frames[node] is frame:
                    yield node

    def calls(self, root: Code, *names: str) -> list[ast.Call]:
        """The calls that run when `root` runs: all calls, or the calls with these last names."""
        calls = self.within(root, ast.Call)
        return [call for call in calls if not names or last_name(call) in names]

    def names(self, root: Code) -> set[str]:
        """Every dotted name in an expression, with its prefixes: `self.x.y` gives self, self.x,
        self.x.y.
        """
        return {dotted(node) for node in self.within(root, ast.expr)} - {""}

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield pairs (above, below) up to the frame that `node` runs in. `below` is the child of
        `above` that is or contains `node`.
        """
        frame = self.frames[node]
        while node is not frame:
            yield self.parents[node], node
            node = self.parents[node]

    def scope(self, node: ast.AST) -> ast.AST:
        """The function that `node` is in, or the module."""
        return self._around(self.frames[node], (ast.FunctionDef, ast.AsyncFunctionDef))

    def home(self, node: ast.AST) -> ast.AST:
        """The class that `node` is in, or the module."""
        return self._around(node, (ast.ClassDef,))

    def _around(self, node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> ast.AST:
        while not isinstance(node, (*kinds, ast.Module)):
            node = self.frames[node]
        return node

    def loops(self, node: ast.AST) -> list[Loop]:
        """The loops that repeat `node`, the innermost first."""
        loops: list[Loop] = []
        for above, below in self.ancestors(node):
            if isinstance(above, Loop) and below in above.body:
                loops.append(above)
        return loops

    def lookup(self, name: str, node: ast.AST) -> list[Binding]:
        """The bindings of a name that is used at `node`, in the order of lines: those in the
        innermost function that binds it, else in the module. For `self.x`: those in the class.
        """
        if name.startswith("self."):
            return self._bound.get((self.home(node), name), [])
        bindings: list[Binding] = []
        while not bindings and not isinstance(node, ast.Module):
            node = self.scope(node)
            bindings = self._bound.get((node, name), [])
        return bindings

    def definition(self, node: ast.expr) -> Value:
        """Return the value of a name, or None if it is not certain. It is certain if the name is
        bound once in its function, or once in the innermost loop, and before `node`.
        """
        name = dotted(node)
        bindings = self.lookup(name, node)
        if name.startswith("self."):
            bindings = [b for b in bindings if self.scope(b.node) is self.scope(node)]
        loops = self.loops(node)
        if len(bindings) > 1 and loops:
            bindings = [b for b in bindings if self.inside(b.node, loops[0])]
        if len(bindings) != 1 or isinstance(bindings[0].node, ast.withitem):
            return None
        return bindings[0].value if self.before(bindings[0].node, node) else None

    def same(self, name: str, node: ast.AST, other: ast.AST) -> bool:
        """Whether a name has the same bindings at both nodes."""
        return bool(name) and self.lookup(name, node) == self.lookup(name, other)

    def assigned(self, value: ast.expr) -> str:
        """The name that a value is assigned to; "" for no name or several."""
        match self.parents[value]:
            case ast.Assign([target]):
                return dotted(target)
        return ""

    def name(self, node: ast.AST | None) -> str:
        """The dotted name with its import resolved; "" for a node without a name, and for a name
        that is imported from several places.
        """
        first, dot, rest = dotted(node).partition(".")
        homes = self.imports.get(first, {"torch.distributed"} if first == "dist" else {first})
        if len(homes) != 1:
            return ""
        (home,) = homes
        return f"{home}{dot}{rest}"

    def text(self, node: ast.AST | None) -> str:
        """The code of a node in Python's own spelling; "" for None."""
        if node is None:
            return ""
        if node not in self._texts:
            self._texts[node] = ast.unparse(node)
        return self._texts[node]

    def called(self, call: ast.Call) -> Function | None:
        """The function of this file that `name(...)` calls, if only one function has the name."""
        functions = []
        for function in self.functions[dotted(call.func)]:
            if not isinstance(self.frames[function], ast.ClassDef):
                functions.append(function)
        return functions[0] if len(functions) == 1 else None


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, with the full name of what it stands for."""
    match node:
        case ast.Import(aliases):
            for alias in aliases:
                top = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        case ast.ImportFrom(module, [ast.alias("*")]):
            yield "*", module or ""
        case ast.ImportFrom(module, aliases, level):
            for alias in aliases:
                yield alias.asname or alias.name, f"{'.' * level}{module or ''}.{alias.name}"


def _bindings(node: ast.AST) -> Iterator[tuple[str, Value]]:
    match node:
        case ast.Assign(targets, value):
            for target in targets:
                yield from _unpacked(target, value)
        case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target, value):
            yield from _unpacked(target, value)
        case ast.AugAssign() | ast.For() | ast.AsyncFor() | ast.comprehension():
            yield from _unpacked(node.target, None)
        case ast.withitem(value, ast.expr() as target):
            yield from _unpacked(target, value)
        case ast.arg(name):
            yield name, None


def _unpacked(target: ast.expr, value: Value) -> Iterator[tuple[str, Value]]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield dotted(target), value
        return
    values: list[Value] = [None] * len(target.elts)
    if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(values):
        values = [*value.elts]
    for part, part_value in zip(target.elts, values, strict=True):
        yield from _unpacked(part, part_value)
