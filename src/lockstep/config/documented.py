"""The strings under a dataclass's fields, which Python forgets, as the Args list of its
docstring: written once, and there for help().
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


def documented(cls: type[C]) -> type[C]:
    """A decorator, over @dataclass. Without source or docstrings (python -OO) the docstring
    stays as it is.
    """
    if cls.__doc__ is not None:
        cls.__doc__ = _Docstring(cls, cls.__doc__)  # type: ignore[assignment]  # a string for whoever reads it
    return cls


def takes_fields(cls: type, *, leaves_out: tuple[str, ...] = ()) -> Callable[[F], F]:
    """A decorator, over a class or function whose `**keywords` are fields of `cls`: help() and
    completion show them by name.

    `<fields>` in its docstring stands for their lines of the Args list.
    """

    def shown(to: F) -> F:
        own = inspect.signature(to)
        named = [
            each
            for each in own.parameters.values()
            if each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        hints = get_type_hints(cls)
        theirs = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            for name, each in inspect.signature(cls).parameters.items()
            if name not in own.parameters and name not in leaves_out
        ]
        to.__signature__ = own.replace(parameters=[*named, *theirs])  # type: ignore[attr-defined]
        if to.__doc__ is not None and "<fields>" in to.__doc__:
            strings = field_docstrings(cls)
            lines = [f"{each.name}: {strings.get(each.name, 'a field.')}" for each in theirs]
            to.__doc__ = to.__doc__.replace("<fields>", "\n        ".join(lines))
        return to

    return shown


class _Docstring:
    """Made when it is read: to parse the source takes longer than the rest of the import."""

    def __init__(self, cls: type[Any], own: str) -> None:
        self._cls, self._own = cls, own
        self._made: str | None = None

    def __get__(self, instance: object, owner: type[Any] | None = None) -> str:
        if self._made is None:
            self._made = _with_arguments(self._cls, self._own)
        return self._made


def _with_arguments(cls: type[Any], own: str) -> str:
    strings = field_docstrings(cls)
    if not strings:
        return own
    lines = [
        f"    {each.name}: {strings[each.name]}" for each in fields(cls) if each.name in strings
    ]
    return "\n".join([inspect.cleandoc(own), "", "Args:", *lines])


def field_docstrings(cls: Any) -> Mapping[str, str]:
    """The strings under the fields of a dataclass and of its bases; none where there is no
    source.
    """
    inherited = {
        name: text
        for base in reversed(cls.__bases__)
        if is_dataclass(base)
        for name, text in field_docstrings(base).items()
    }
    return inherited | _declared_in(cls.__module__).get(cls.__qualname__, {})


@cache
def _declared_in(module: str) -> Mapping[str, dict[str, str]]:
    """By a class's qualified name, for all of a module: it is read once, since finding a class's
    own source walks through everything that is imported.
    """
    found = sys.modules[module]
    lines = linecache.getlines(getattr(found, "__file__", None) or "", vars(found))
    try:
        return dict(_strings(ast.parse("".join(lines)).body))
    except SyntaxError:
        return {}


def _strings(body: Sequence[ast.stmt], scope: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                pairs = zip(node.body, node.body[1:], strict=False)
                yield (
                    f"{scope}{name}",
                    {field: text for pair in pairs for field, text in _field(*pair)},
                )
                yield from _strings(node.body, f"{scope}{name}.")
            case ast.FunctionDef(name=name):
                yield from _strings(node.body, f"{scope}{name}.<locals>.")


def _field(statement: ast.stmt, below: ast.stmt) -> Iterator[tuple[str, str]]:
    """A field's name and the string under it, where these two statements are that."""
    match statement, below:
        case (
            ast.AnnAssign(target=ast.Name(id=name)),
            ast.Expr(value=ast.Constant(value=str() as text)),
        ):
            yield name, " ".join(text.split())
