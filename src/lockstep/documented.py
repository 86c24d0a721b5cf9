"""The strings under a dataclass's fields, which Python forgets, as the Args list of its docstring: written once, and there for help()."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields
from typing import Any, TypeVar

C = TypeVar("C")


def documented(cls: type[C]) -> type[C]:
    """A decorator, over @dataclass. Without source or docstrings (python -OO) the class stays as it is."""
    try:
        strings = _strings(cls)
    except (OSError, TypeError, SyntaxError):
        return cls
    names = [each.name for each in fields(cls)]  # type: ignore[arg-type]  # a dataclass
    if cls.__doc__ is not None:
        lines = [f"    {name}: {strings[name]}" for name in names if name in strings]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__), "", "Args:", *lines])
    return cls


def _strings(cls: type[Any]) -> dict[str, str]:
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(found, ast.ClassDef)
    strings = {}
    for field, below in zip(found.body, found.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                strings[name] = " ".join(text.split())
    return strings
