"""A file's syntax tree with what the tree itself does not tell: parents, scopes, what a name stands for.

Names are dotted text: `x`, `self.model`, `torch.distributed.barrier` (after the file's imports are put in).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding before it knows its file."""

    line: int
    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class Binding:
    """A place where a name gets a value: `value` is its expression, None where it is not a plain one (a parameter, a loop, `+=`)."""

    node: ast.AST
    value: ast.expr | None

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)


def dotted(node: ast.AST | None) -> str | None:
    """`a.b.c` for a chain of names, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def last_name(node: ast.AST) -> str:
    """What is called by a call: `c` of `a().b.c(...)`; "" if it has no name."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def local(root: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `root` that run with it: not the bodies of functions and classes defined in it."""
    for child in ast.iter_child_nodes(root):
        yield child
        if not isinstance(child, _DEFINITIONS):
            yield from local(child)


def calls(root: ast.AST) -> Iterator[ast.Call]:
    return (node for node in local(root) if isinstance(node, ast.Call))


def names_in(root: ast.AST) -> set[str]:
    """Every dotted name in an expression, with its beginnings: `self.x.y` gives self, self.x, self.x.y."""
    return {name for node in ast.walk(root) if (name := dotted(node)) is not None}


class Source:
    """Answers questions about one file. Nothing is executed or imported."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.nodes = list(ast.walk(tree))
        self.parents = {child: parent for parent in self.nodes for child in ast.iter_child_nodes(parent)}
        self._bindings: dict[ast.AST, dict[str, list[Binding]]] = {}
        self._attributes: dict[ast.AST, dict[str, list[Binding]]] = {}  # of each class

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """From the parent up to and with the function (or the module) that `node` runs in."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            if isinstance(parent, (*_DEFINITIONS, ast.Module)):
                return
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """The function that `node` is in, or the module."""
        while not isinstance(node := self.parents[node], Scope):
            pass
        return node

    def inside(self, node: ast.AST, root: ast.AST) -> bool:
        current: ast.AST | None = node
        while current is not None and current is not root:
            current = self.parents.get(current)
        return current is root

    @cached_property
    def functions(self) -> dict[str, Function | None]:
        """This file's functions by name; None for a name that is defined more than once. Methods are not among them."""
        found: dict[str, Function | None] = {}
        for node in self.nodes:
            if isinstance(node, Function) and not isinstance(self.parents[node], ast.ClassDef):
                found[node.name] = None if node.name in found else node
        return found

    def named(self, name: str) -> list[Function]:
        """All functions and methods of that name."""
        return self._named.get(name, [])

    @cached_property
    def _named(self) -> dict[str, list[Function]]:
        found: dict[str, list[Function]] = {}
        for node in self.nodes:
            if isinstance(node, Function):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    found.setdefault(alias.asname or top, set()).add(alias.name if alias.asname else top)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, set()).add(f"{module}.{alias.name}")
        return found

    def full_name(self, node: ast.AST | None) -> str | None:
        """The dotted name with the import put in; None for what is no name, and for one that is imported from several places."""
        name = dotted(node)
        if name is None:
            return None
        first, _, rest = name.partition(".")
        homes = self.imports.get(first)
        if not homes:
            return name
        if len(homes) > 1:
            return None
        return ".".join(filter(None, (*homes, rest)))

    def is_imported(self, node: ast.AST | None) -> bool:
        return (name := dotted(node)) is not None and name.split(".")[0] in self.imports

    def bindings(self, scope: Scope) -> dict[str, list[Binding]]:
        """What a function (or the module) gives values to, in the order of the lines; attributes of self as `self.x`."""
        if scope not in self._bindings:
            found: dict[str, list[Binding]] = {}
            if not isinstance(scope, ast.Module):
                arguments = scope.args
                for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
                    if each is not None:
                        found.setdefault(each.arg, []).append(Binding(each, None))
            for node in local(scope):
                for target, value in _targets(node):
                    if (name := dotted(target)) is not None:
                        found.setdefault(name, []).append(Binding(node, value))
            for each_name in found.values():
                each_name.sort(key=lambda binding: binding.line)
            self._bindings[scope] = found
        return self._bindings[scope]

    def lookup(self, name: str, node: ast.AST) -> list[Binding]:
        """The bindings that a name at `node` may mean: of the innermost function that binds it; for `self.x`, of the whole class."""
        if name.startswith("self."):
            return self._of_class(name, node)
        scope: ast.AST | None = node
        while scope is not None and not isinstance(scope, ast.Module):
            scope = self.scope(scope)
            if found := self.bindings(scope).get(name):
                return found
        return []

    def _of_class(self, name: str, node: ast.AST) -> list[Binding]:
        home: ast.AST | None = node
        while home is not None and not isinstance(home, ast.ClassDef):
            home = self.parents.get(home)
        if home is None:
            return []
        if home not in self._attributes:
            found: dict[str, list[Binding]] = {}
            for method in ast.walk(home):
                for each, bound in self.bindings(method).items() if isinstance(method, Function) else ():
                    found.setdefault(each, []).extend(bound)
            self._attributes[home] = {each: sorted(bound, key=lambda binding: binding.line) for each, bound in found.items()}
        return self._attributes[home].get(name, [])

    def loops(self, node: ast.AST) -> list[Loop]:
        """The loops around `node` in its function, the innermost first; not one whose head or else branch it is in."""
        found, below = [], node
        for above in self.ancestors(node):
            if isinstance(above, Loop) and any(below is statement for statement in above.body):
                found.append(above)
            below = above
        return found


def _targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        yield node.target, None
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield from _unpacked(node.target, None)
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield from _unpacked(item.optional_vars, item.context_expr)


def _unpacked(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, value
        return
    values: list[ast.expr | None] = [None] * len(target.elts)
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        values = list(value.elts)
    for each, its in zip(target.elts, values, strict=True):
        yield from _unpacked(each, its)
