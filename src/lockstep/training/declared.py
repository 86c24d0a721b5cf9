"""What a task's file declares, read without running it: a mistake that shows there is told at once,
before torch is loaded.

What cannot be told without running the file (a `task` that is imported, decorated, or made in a
loop) is left to `resolve`.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import TaskError
from lockstep.training.overrides import Parameter, converted, type_of_default
from lockstep.training.resolve import file_of, locate

_NAMES = {
    "__builtins__": {},
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "None": None,
    "Any": Any,
    "typing": typing,
} | {name: getattr(typing, name) for name in ("Literal", "Optional", "Union")}
# by which a file may define names that its text does not show
_UNSEEN = {"globals", "exec", "eval", "setattr", "__getattr__"}


def located(name: str, overrides: Mapping[str, str] | None = None) -> str:
    """As `locate`, and the file has been looked at.

    Raises TaskError where its syntax is wrong, where it has no `task()`, and where an override does
    not fit its parameters.
    """
    place = locate(name)
    module = _parsed(file_of(place), name)
    bound = _bound(module)
    if not bound and not any(_hides(node) for node in ast.walk(module)):
        raise TaskError("task-function-missing", file=name, found="not defined")
    functions = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name == "task" and not node.decorator_list
    ]
    if len(bound) == len(functions) == 1:
        converted(dict(_parameters(functions[0])), overrides or {}, name)
    return place


def declares_task(file: Path) -> bool:
    """Whether the file gives the name `task` a value. Raises TaskError where it is not Python."""
    return bool(_bound(_parsed(file, str(file))))


def _bound(module: ast.Module) -> list[ast.AST]:
    """Where the module gives the name `task` a value."""
    return [node for node in _outside_functions(module) if "task" in _binds(node)] + [
        node for node in ast.walk(module) if isinstance(node, ast.Global) and "task" in node.names
    ]


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            yield from _outside_functions(child)


def _parsed(file: Path, name: str) -> ast.Module:
    try:
        text = file.read_bytes()
        compile(text, str(file), "exec", dont_inherit=True)
        return ast.parse(text)
    except SyntaxError as error:
        line = f": `{error.text.strip()}`" if error.text else ""
        raise TaskError(
            "task-file-not-python",
            file=name,
            place=f", line {error.lineno}{line}",
            reason=error.msg,
        ) from None
    except ValueError as error:
        raise TaskError("task-file-not-python", file=name, place="", reason=str(error)) from None
    except OSError as error:
        raise TaskError(
            "cannot-read", name="task file", file=name, reason=str(error.strerror or error)
        ) from None


def _binds(node: ast.AST) -> set[str]:
    """Names that a statement gives a value to, wherever it stands."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    return {node.asname or node.name} if isinstance(node, ast.alias) else set()


def _hides(node: ast.AST) -> bool:
    return (isinstance(node, ast.alias) and node.name == "*") or bool(
        {getattr(node, "id", ""), getattr(node, "name", "")} & _UNSEEN
    )


def _parameters(function: ast.FunctionDef) -> Iterator[tuple[str, Parameter]]:
    taken = function.args
    every = [*taken.posonlyargs, *taken.args]
    defaults = [None] * (len(every) - len(taken.defaults)) + list(taken.defaults)
    pairs = [
        *zip(every, defaults, strict=True),
        *zip(taken.kwonlyargs, taken.kw_defaults, strict=True),
    ]
    for each, default in pairs:
        if each not in taken.posonlyargs:
            yield (
                each.arg,
                Parameter(kind=_kind(each.annotation, default), required=default is None),
            )


def _kind(annotation: ast.expr | None, default: ast.expr | None) -> Any:
    """The type that text is converted to; Any, which takes all, where the file must be run to
    know it.
    """
    if annotation is not None:
        try:
            text = (
                annotation.value
                if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
                else ast.unparse(annotation)
            )
            return eval(text, dict(_NAMES))  # names of plain types alone: nothing of the file runs
        except Exception:
            return Any
    try:
        return str if default is None else type_of_default(ast.literal_eval(default))
    except ValueError:
        return Any
