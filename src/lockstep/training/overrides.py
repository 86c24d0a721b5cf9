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
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.config.knob import closest
from lockstep.errors import TaskError

_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")
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
    annotations = _annotations(function)
    parameters = {}
    for key, declared in inspect.signature(function).parameters.items():
        if declared.kind in (declared.POSITIONAL_OR_KEYWORD, declared.KEYWORD_ONLY):
            required = declared.default is declared.empty
            default = None if required else declared.default
            kind = annotations.get(key, type_of_default(default))
            parameters[key] = Parameter(kind, required, default)
    return converted(parameters, overrides, name)


def converted(
    parameters: Mapping[str, Parameter], overrides: Mapping[str, str], name: str
) -> dict[str, Any]:
    """Return `overrides` as values for these parameters of the task `name`. Raises TaskError as
    `arguments` does.
    """
    by_parameter: dict[str, dict[str, str]] = {}
    for key, text in overrides.items():
        head, _, path = key.partition(".")
        if head not in parameters:
            raise _unknown(key, text, name, "it", head, parameters)
        by_parameter.setdefault(head, {})[path] = text
    for key, parameter in parameters.items():
        if parameter.required and "" not in by_parameter.get(key, {}):
            raise TaskError("task-argument-missing", key=key, file=name)
    return {key: _value(key, parameters[key], texts, name) for key, texts in by_parameter.items()}


def _value(key: str, parameter: Parameter, texts: Mapping[str, str], name: str) -> Any:
    """Return one parameter's value. `texts`: by the path inside it; "" is the whole parameter."""
    value = parameter.default
    if "" in texts:
        value = _convert(key, texts[""], parameter.kind)
    if parameter.default is not UNSEEN:
        for path, text in texts.items():
            if path:
                value = _changed(value, path, text, key, name)
    return value


def _changed(value: Any, path: str, text: str, key: str, name: str) -> Any:
    """Return a copy of `value`, the value of `key`, in which `text` replaces what is at `path`."""
    head, _, rest = path.partition(".")
    members = _members(value)
    if head not in members:
        raise _unknown(f"{key}.{path}", text, name, key, head, members)
    member, kind = members[head]
    member_key = f"{key}.{head}"
    new = (
        _changed(member, rest, text, member_key, name) if rest else _convert(member_key, text, kind)
    )
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{head: new})
    changed = copy.copy(value)
    changed[head] = new
    return changed


def _members(value: Any) -> dict[str, tuple[Any, Any]]:
    """Return the members of a value by name, each with its type."""
    members = {}
    if is_dataclass(value) and not isinstance(value, type):
        annotations = _annotations(type(value))
        for field in fields(value):
            if field.init:
                member = getattr(value, field.name)
                members[field.name] = member, annotations.get(field.name, type(member))
    elif isinstance(value, Mapping):
        for key, member in value.items():
            members[key] = member, _ANY if member is None else type(member)
    return members


def _unknown(
    key: str, text: str, name: str, owner: str, head: str, members: Iterable[str]
) -> TaskError:
    """Return the error for a key of which `owner` has no member `head`."""
    choices = list(members)
    known = f"{owner} takes {', '.join(choices) or 'nothing'}{closest(head, choices)}"
    return TaskError("override-unknown", key=key, value=text, file=name, known=known)


def type_of_default(default: object) -> Any:
    """Return the type of a parameter that has no annotation."""
    return str if default is None else type(default)


def _annotations(function: Callable[..., object]) -> dict[str, Any]:
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
        with suppress(ValueError):
            return _convert_to(choice, text.strip())
    expected = " or ".join(map(_spelled, choices))
    raise TaskError("override-wrong-value", key=key, value=text, choices=expected)


def _convert_to(kind: Any, text: str) -> Any:
    """Convert `text` to one type. Raises ValueError if it does not fit."""
    if kind is Any:
        return text
    if kind in (int, float, str):
        return kind(text)
    if kind is bool and text.lower() in _YES:
        return True
    if kind is bool and text.lower() in _NO:
        return False
    if get_origin(kind) is Literal:
        for value in get_args(kind):
            if str(value) == text:
                return value
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
