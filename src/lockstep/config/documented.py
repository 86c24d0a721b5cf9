"""Add the docstrings under a dataclass's fields to the class's docstring, as its Args list, so that
help() shows them. Python itself discards them.
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
    """A docstring that is built when it is first read, because parsing the source takes longer than
    the rest of the import.
    """

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
    """Return the strings under the fields of a dataclass and of its bases, by field; empty if
    there is no source.
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
    """Return the field docstrings of all classes of a module, by qualified name. It parses the
    module once, because finding the source of one class searches all imported modules.
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
    """Yield (name, string) if `statement` declares a field and `below` is a string."""
    match statement, below:
        case (
            ast.AnnAssign(target=ast.Name(id=name)),
            ast.Expr(value=ast.Constant(value=str() as text)),
        ):
            yield name, " ".join(text.split())
