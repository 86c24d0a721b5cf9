"""Add the docstrings under a dataclass's fields to the class's docstring, as its Args list, so that
help() shows them. Python itself discards them.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, get_type_hints

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


def documented(cls: type[C]) -> type[C]:
    """Add the Args list to the docstring of `cls`. Place this decorator above @dataclass. Without
    source or docstrings (python -OO) it changes nothing.
    """
    if cls.__doc__ is not None:
        # the ignore: a descriptor that returns a string
        cls.__doc__ = _Docstring(cls, cls.__doc__)  # type: ignore[assignment]
    return cls


def takes_fields(cls: type, *, leaves_out: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Return a decorator for a class or function whose `**keywords` are fields of `cls`. help() and
    completion then show the fields' names.

    In its docstring, `<fields>` is replaced by the fields' lines of the Args list.
    """

    def decorate(target: F) -> F:
        signature = inspect.signature(target)
        parameters = dict(signature.parameters)
        parameters.popitem()  # **keywords
        annotations = get_type_hints(cls)
        docstrings = field_docstrings(cls)
        lines = []
        for name, parameter in inspect.signature(cls).parameters.items():
            if name not in signature.parameters and name not in leaves_out:
                parameters[name] = parameter.replace(
                    kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotations[name]
                )
                lines.append(f"{name}: {docstrings.get(name, 'a field.')}")
        target.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(parameters.values())
        )
        if target.__doc__ is not None:
            target.__doc__ = target.__doc__.replace("<fields>", "\n        ".join(lines))
        return target

    return decorate


class _Docstring:
    """A docstring that is built when it is read, because parsing the source takes longer than
    the rest of the import.
    """

    def __init__(self, cls: type[Any], own: str) -> None:
        self._cls = cls
        self._own = own

    def __get__(self, instance: object, owner: type[Any] | None = None) -> str:
        return _with_arguments(self._cls, self._own)


def _with_arguments(cls: type[Any], own: str) -> str:
    docstrings = field_docstrings(cls)
    if not docstrings:
        return own
    names = [field.name for field in fields(cls)]
    lines = [f"    {name}: {docstrings[name]}" for name in names if name in docstrings]
    return "\n".join([inspect.cleandoc(own), "", "Args:", *lines])


def field_docstrings(cls: Any) -> Mapping[str, str]:
    """Return the strings under the fields of a dataclass and of its bases, by field; empty if
    there is no source.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docstrings |= _declared_in(base.__module__).get(base.__qualname__, {})
    return docstrings


@cache
def _declared_in(module: str) -> Mapping[str, dict[str, str]]:
    """Return the field docstrings of all classes of a module, by qualified name. It parses the
    module once, because finding the source of one class searches all imported modules.
    """
    namespace = vars(sys.modules[module])
    lines = linecache.getlines(namespace.get("__file__") or "", namespace)
    try:
        return dict(_class_docstrings(ast.parse("".join(lines)).body))
    except SyntaxError:
        return {}


def _class_docstrings(
    body: Sequence[ast.stmt], scope: str = ""
) -> Iterator[tuple[str, dict[str, str]]]:
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                yield f"{scope}{name}", _strings_under_fields(node)
                yield from _class_docstrings(node.body, f"{scope}{name}.")
            case ast.FunctionDef(name=name):
                yield from _class_docstrings(node.body, f"{scope}{name}.<locals>.")


def _strings_under_fields(node: ast.ClassDef) -> dict[str, str]:
    docstrings = {}
    for statement, below in pairwise(node.body):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                docstrings[name] = " ".join(text.split())
    return docstrings
