"""Errors of the command line in one style, `error: --workers two: give a whole number`, whether the
parser or Lockstep finds them.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from lockstep.errors import UsageError

REFUSED: Any = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)
"""The base class of the parser's exceptions. Its module depends on typer's version."""

_PAIR = re.compile(r"""(?<![\w-])([a-z][a-z_]*)=('[^']*'|"[^"]*"|[^\s,;:()]*[^\s,;:().])""")
_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
_ADVICE = re.compile(r"(?i)\b(leave|give|use) ([a-z]+)\b")
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
        value = _typed(error.param.opts, line)
        return UsageError(
            "wrong-argument",
            name=_shown(error.param),
            given="" if value is None else f" {value}",
            wanted=_takes(context, error),
        )
    text = error.format_message().rstrip(".")
    reason = f"{text[:1].lower()}{text[1:]}{'' if text.endswith('?') else '.'}"
    return UsageError("wrong-command-line", reason=reason, command=path)


def as_typed(message: str, line: Sequence[str]) -> str:
    """Replace names of the Python API by options: `precision='bf8'` becomes `--precision bf8`, if
    the command line gave this option.
    """
    from lockstep.config.knob import knobs
    from lockstep.config.settings import Config

    given = _given(line)
    pairs = {found[1]: found[2].strip("'\"") for found in _PAIR.finditer(message)}
    if not any(name in given and _same(value, given[name]) for name, value in pairs.items()):
        return message  # a task's own value, or no option at all

    def pair(found: re.Match[str]) -> str:
        name, value = found[1], pairs[found[1]]
        if value == "True":
            return _option(name)
        return (
            f"{_option(name)}"
            f" {given[name] if name in given and _same(value, given[name]) else value}"
        )

    known = pairs.keys() | given.keys() | knobs(Config).keys()

    def advice(found: re.Match[str]) -> str:
        return f"{found[1]} {_option(found[2])}" if found[2] in known else found[0]

    message = _ADVICE.sub(advice, _PAIR.sub(pair, message))
    return _NAME.sub(lambda found: _option(found[0]) if found[0] in known else found[0], message)


def _given(line: Sequence[str]) -> Mapping[str, str]:
    """Return the options and their values, by their Python names."""
    found = {}
    for number, word in enumerate(line):
        name, equals, value = word.partition("=")
        if re.fullmatch(r"--[a-z][a-z-]+", name):
            following = line[number + 1] if number + 1 < len(line) else ""
            found[name[2:].replace("-", "_")] = value if equals else following
    if "-n" in line[:-1]:
        found["workers"] = line[line.index("-n") + 1]
    return found


def _same(value: str, typed: str) -> bool:
    try:
        return value == typed or float(value) == float(typed)
    except ValueError:
        return False


def _typed(names: Sequence[str], line: Sequence[str]) -> str | None:
    for number, word in enumerate(line):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else line[number + 1] if number + 1 < len(line) else None
    return None


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


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
