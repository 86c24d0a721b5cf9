"""Errors of the command line in one style, `error: --workers two: give a whole number`, whether the
parser or Lockstep finds them.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from enum import Enum
from itertools import zip_longest
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from lockstep.errors import TaskError, UsageError

REFUSED: Any = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)
"""The base class of the parser's exceptions. Its module depends on typer's version."""

_TYPES = {int: "a whole number", float: "a number"}


def of_parser(error: Any, line: Sequence[str]) -> UsageError:
    """Convert the parser's error to a UsageError. `line` is the command line without the program's
    name.
    """
    context, kind = getattr(error, "ctx", None), type(error).__name__
    path = _command(context)
    if kind == "NoSuchOption":
        options = (
            []
            if context is None
            else [
                name
                for each in context.command.params
                for name in (*each.opts, *each.secondary_opts)
            ]
        )
        return UsageError(
            "unknown-option",
            option=error.option_name,
            command=path,
            near=meant(error.option_name, options),
        )
    if kind == "MissingParameter" and error.param is not None:
        return UsageError("missing-argument", name=_shown(error.param), command=path)
    if kind == "BadParameter" and error.param is not None:
        given = _given(line)
        values = [f" {given[name]}" for name in error.param.opts if name in given]
        return UsageError(
            "wrong-argument",
            name=_shown(error.param),
            given="".join(values[:1]),
            wanted=_takes(context, error),
        )
    text = error.format_message().rstrip(".")
    reason = f"{text[:1].lower()}{text[1:]}{'' if text.endswith('?') else '.'}"
    return UsageError("wrong-command-line", reason=reason, command=path)


def as_typed(error: UsageError, line: Sequence[str]) -> str:
    """Return the error's text with the options of the command line as they were typed:
    `precision='bf8'` becomes `--precision bf8`. What a task's file has set stays as it is there.
    """
    if isinstance(error, TaskError):
        return str(error)
    message = f" {error}"  # so that every name is after a space
    values: dict[Any, Any] = {error.values.get("name"): error.values.get("value"), **error.values}
    for typed, text in _given(line).items():
        option = "--workers" if typed == "-n" else typed
        name = option.removeprefix("--").replace("-", "_")
        if values.get(name) is True:
            message = message.replace(f" {name}=True", f" {option}")
        for value in (text, values.get(name, text)):
            message = message.replace(f" {name}={value!r}", f" {option} {text}")
    return message[1:]


def _given(line: Sequence[str]) -> dict[str, str]:
    """Return the options on the command line, each with the text after it."""
    given = {}
    for word, following in zip_longest(line, line[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if option.startswith("-"):
            given[option] = value if equals else following
    return given


def meant(name: str, options: Collection[str]) -> str:
    """Return ` (did you mean ...?)`. Options that begin with `name` come first."""
    begun = sorted(each for each in options if each.startswith(name))
    close = [each for each in get_close_matches(name, options) if each not in begun]
    found = [*begun, *close][:3]
    return f" (did you mean {', '.join(found)}?)" if found else ""


def _takes(context: Any, error: Any) -> str:
    """Say what the option's declaration allows, or return the parser's message."""
    hint = get_type_hints(inspect.unwrap(context.command.callback), include_extras=True).get(
        error.param.name
    )
    extras: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        extras = tuple(rest)
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = next((_TYPES[each] for each in kinds if each in _TYPES), None)
    choices = next(
        (each for each in kinds if isinstance(each, type) and issubclass(each, Enum)), None
    )
    if choices is not None:
        return f"choose one of {', '.join(str(each.value) for each in choices)}"
    if words is None:
        return str(error.message)
    least = next((each.min for each in extras if getattr(each, "min", None) is not None), None)
    return f"give {words}{f' of at least {least}' if least is not None else ''}"


def _shown(param: Any) -> str:
    options = [each for each in param.opts if each.startswith("--")]
    return options[0] if options else str(param.metavar or param.name.upper()).strip("{}[]")


def _command(context: Any) -> str:
    return "lockstep" if context is None else str(context.command_path)
