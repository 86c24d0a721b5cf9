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

REFUSED: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
"""The base class of the parser's exceptions. Its module depends on typer's version."""

_TYPES = {int: "a whole number", float: "a number"}


def of_parser(error: Any, line: Sequence[str]) -> UsageError:
    """Convert the parser's error to a UsageError. `line` is the command line without the program's
    name.
    """
    context = getattr(error, "ctx", None)
    path = "lockstep" if context is None else str(context.command_path)
    kind = type(error).__name__
    if kind == "NoSuchOption":
        options: list[str] = []
        for param in [] if context is None else context.command.params:
            options += [*param.opts, *param.secondary_opts]
        near = meant(error.option_name, options)
        return UsageError("unknown-option", option=error.option_name, command=path, near=near)
    if kind == "MissingParameter" and error.param is not None:
        return UsageError("missing-argument", name=_shown(error.param), command=path)
    if kind == "BadParameter" and error.param is not None:
        typed = _typed_options(line)
        values = [f" {typed[name]}" for name in error.param.opts if name in typed]
        return UsageError(
            "wrong-argument",
            name=_shown(error.param),
            given="".join(values[:1]),
            wanted=_expected(context, error),
        )
    text = error.format_message().rstrip(".")
    reason = f"{text[:1].lower()}{text[1:]}"
    if not text.endswith("?"):
        reason += "."
    return UsageError("wrong-command-line", reason=reason, command=path)


def as_typed(error: UsageError, line: Sequence[str]) -> str:
    """Return the error's text with the options of the command line as they were typed:
    `precision='bf8'` becomes `--precision bf8`. What a task's file has set stays as it is there.
    """
    if isinstance(error, TaskError):
        return str(error)
    message = f" {error}"  # so that every name is after a space
    values: dict[Any, Any] = {error.values.get("name"): error.values.get("value"), **error.values}
    for option, text in _typed_options(line).items():
        if option == "-n":
            option = "--workers"
        name = option.removeprefix("--").replace("-", "_")
        if values.get(name) is True:
            message = message.replace(f" {name}=True", f" {option}")
        for value in (text, values.get(name, text)):
            message = message.replace(f" {name}={value!r}", f" {option} {text}")
    return message[1:]


def _typed_options(line: Sequence[str]) -> dict[str, str]:
    """Return the options on the command line, each with the text after it."""
    options = {}
    for word, following in zip_longest(line, line[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if option.startswith("-"):
            options[option] = value if equals else following
    return options


def meant(name: str, options: Collection[str]) -> str:
    """Return ` (did you mean ...?)`. Options that begin with `name` come first."""
    matches = sorted(option for option in options if option.startswith(name))
    matches += [option for option in get_close_matches(name, options) if option not in matches]
    return f" (did you mean {', '.join(matches[:3])}?)" if matches else ""


def _expected(context: Any, error: Any) -> str:
    """Return in words what the option's declaration allows, or the parser's message."""
    annotations = get_type_hints(inspect.unwrap(context.command.callback), include_extras=True)
    annotation = annotations.get(error.param.name)
    least = None
    if get_origin(annotation) is Annotated:
        annotation, option, *_ = get_args(annotation)
        least = getattr(option, "min", None)
    optional = get_origin(annotation) in (Union, types.UnionType)
    for kind in get_args(annotation) if optional else (annotation,):
        if isinstance(kind, type) and issubclass(kind, Enum):
            return f"choose one of {', '.join(str(choice.value) for choice in kind)}"
        if kind in _TYPES:
            bound = "" if least is None else f" of at least {least}"
            return f"give {_TYPES[kind]}{bound}"
    return str(error.message)


def _shown(param: Any) -> str:
    for option in param.opts:
        if option.startswith("--"):
            return str(option)
    return str(param.metavar or param.name.upper()).strip("{}[]")
