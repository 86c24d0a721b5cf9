"""--set key=value: text from the command line becomes keyword arguments of `task()`, by the
types that the function declares.
"""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.errors import TaskError

_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One that `task()` takes."""

    kind: Any
    """Its type."""
    required: bool


def arguments(
    function: Callable[..., object], overrides: Mapping[str, str], name: str
) -> dict[str, Any]:
    """The keyword arguments for `function`, from text.

    A parameter's type is its annotation (int, float, bool, str, Literal of these, any of them or
    None), else its default's. Raises TaskError for an unknown key, a value that does not fit, a
    type that text cannot give, and a parameter left without a value.
    """
    hints = _hints(function)
    parameters = {
        key: Parameter(
            hints.get(key, type_of_default(None if each.default is each.empty else each.default)),
            each.default is each.empty,
        )
        for key, each in inspect.signature(function).parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    return converted(parameters, overrides, name)


def converted(
    parameters: Mapping[str, Parameter], overrides: Mapping[str, str], name: str
) -> dict[str, Any]:
    """`overrides` as values for these parameters of the task `name`. Raises TaskError, as
    `arguments` does.
    """
    for key in overrides:
        if key not in parameters:
            known = f"it takes {', '.join(parameters)}" if parameters else "it takes nothing"
            raise TaskError(
                "override-unknown",
                key=key,
                value=overrides[key],
                file=name,
                known=known + closest(key, parameters),
            )
    for key, parameter in parameters.items():
        if parameter.required and key not in overrides:
            raise TaskError("task-argument-missing", key=key, file=name)
    return {key: _convert(key, text, parameters[key].kind) for key, text in overrides.items()}


def type_of_default(default: object) -> Any:
    """What a parameter without an annotation takes."""
    return str if default is None else type(default)


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        # annotated with names that exist for type checkers only: the defaults' types count
        return {}


def _convert(key: str, text: str, kind: Any) -> Any:
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if types.NoneType in choices and text.strip().lower() == "none":
        return None
    for choice in choices:
        try:
            return _one(text.strip(), choice)
        except ValueError:
            continue
    raise TaskError(
        "override-wrong-value", key=key, value=text, choices=" or ".join(map(_spelled, choices))
    )


def _one(text: str, kind: Any) -> Any:
    """One type's value; ValueError where the text is none."""
    if get_origin(kind) is Literal:
        return (
            next(value for value in get_args(kind) if str(value) == text)
            if text in map(str, get_args(kind))
            else _refuse()
        )
    if kind is bool:
        return True if text.lower() in _YES else False if text.lower() in _NO else _refuse()
    if kind in (int, float, str):
        return kind(text)
    return text if kind is Any else _refuse()


def _refuse() -> Any:
    raise ValueError


def _spelled(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        types.NoneType: "none",
    }
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}, which --set cannot give")


def closest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'digits'?)", or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
