"""--set key=value: convert texts to the arguments of a task file's `task()`.

--set lr=0.1                  a parameter: its annotation, else its default, gives the type
--set optimizer.lr=0.1        a value inside a parameter's default, which is a dict or a dataclass:
                              the value that is there gives the type
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.config.knob import closest
from lockstep.errors import TaskError

_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


_ANY = int | float | bool | str | None  # if there is no value that gives the type
UNSEEN: Any = object()
"""A parameter's default that is not known before the file runs."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of `task()`."""

    kind: Any
    """Its type."""
    required: bool
    default: Any = None


def arguments(
    function: Callable[..., object], overrides: Mapping[str, str], name: str
) -> dict[str, Any]:
    """Return the keyword arguments for `function`, converted from text.

    A parameter's type is its annotation (int, float, bool, str, Literal of these, any of them or
    None), else its default's. Raises TaskError for an unknown key, a value that does not fit, a
    type that text cannot give, and a parameter left without a value.

    Args:
        function: the `task` of a task file.
        overrides: texts by parameter, or by `parameter.path.inside.it`.
        name: the name of the task, for errors.
    """
    hints = _hints(function)
    parameters = {
        key: Parameter(
            hints.get(key, type_of_default(None if each.default is each.empty else each.default)),
            each.default is each.empty,
            None if each.default is each.empty else each.default,
        )
        for key, each in inspect.signature(function).parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    return converted(parameters, overrides, name)


def converted(
    parameters: Mapping[str, Parameter], overrides: Mapping[str, str], name: str
) -> dict[str, Any]:
    """Return `overrides` as values for these parameters of the task `name`. Raises TaskError as
    `arguments` does.
    """
    given: dict[str, dict[str, str]] = {}
    for key, text in overrides.items():
        head, _, path = key.partition(".")
        if head not in parameters:
            raise _unknown(key, text, name, "it", head, parameters)
        given.setdefault(head, {})[path] = text
    for key, parameter in parameters.items():
        if parameter.required and "" not in given.get(key, {}):
            raise TaskError("task-argument-missing", key=key, file=name)
    return {key: _value(key, parameters[key], texts, name) for key, texts in given.items()}


def _value(key: str, parameter: Parameter, texts: Mapping[str, str], name: str) -> Any:
    """Return one parameter's value. `texts`: by the path inside it; "" is the whole parameter."""
    inside = {path: text for path, text in texts.items() if path}
    whole = texts.get("")
    value = parameter.default if whole is None else _convert(key, whole, parameter.kind)
    if parameter.default is UNSEEN:
        return value
    for path, text in inside.items():
        value = _changed(value, path, text, key, name)
    return value


def _changed(value: Any, path: str, text: str, key: str, name: str) -> Any:
    """Return a copy of `value`, the value of `key`, in which `text` replaces what is at `path`."""
    here, _, rest = path.partition(".")
    members = _members(value)
    if here not in members:
        raise _unknown(f"{key}.{path}", text, name, key, here, members)
    inner, kind = members[here]
    inside = f"{key}.{here}"
    new = _changed(inner, rest, text, inside, name) if rest else _convert(inside, text, kind)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{here: new})
    changed = copy.copy(value)
    changed[here] = new
    return changed


def _members(value: Any) -> dict[str, tuple[Any, Any]]:
    """Return the members of a value by name, each with its type."""
    if is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        held = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return {key: (each, hints.get(key, type(each))) for key, each in held.items()}
    if not isinstance(value, Mapping):
        return {}
    return {key: (inner, _ANY if inner is None else type(inner)) for key, inner in value.items()}


def _unknown(
    key: str, text: str, name: str, where: str, here: str, members: Iterable[str]
) -> TaskError:
    every = list(members)
    known = f"{where} takes {', '.join(every) or 'nothing'}{closest(here, every)}"
    return TaskError("override-unknown", key=key, value=text, file=name, known=known)


def type_of_default(default: object) -> Any:
    """Return the type of a parameter that has no annotation."""
    return str if default is None else type(default)


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        # annotated with names that exist only for type checkers: use the types of the defaults
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
    """Convert `text` to one type. Raises ValueError if it does not fit."""
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
