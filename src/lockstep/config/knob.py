"""A knob is a field of a frozen dataclass that defines an option: type, default, help, unit, group.

    epochs: Annotated[int | None, Knob("run", least=1, default="the task's own")] = None

The help is the string under the field, one sentence. The command line (cli/options.py), --config
files, settings.json, the site's page of options and the checks of all values use
this definition.

This file also has the checks of single values that all packages share: `whole`, `number`, `chosen`,
`known`, `pairs`.
"""

from __future__ import annotations

import collections.abc
import functools
import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from lockstep.config.documented import field_docstrings
from lockstep.errors import UsageError

Group = Literal[
    "run",
    "training",
    "gradients",
    "model split",
    "faults",
    "checkpoints",
    "cluster",
    "measurement",
    "debug",
]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True, slots=True)
class Knob:
    """The data about an option in its field's annotation, in addition to the type."""

    group: Group
    unit: str = ""
    """The placeholder for a value in the help: STEPS, SECONDS, DIR; or the forms of a value, such
    as auto|2,1,1.
    """
    default: str = ""
    """The default in words, if the field's own default does not explain it."""
    flags: tuple[str, ...] = ()
    """The command line flags, in place of --name."""
    least: float = -math.inf
    above: float = -math.inf
    common: bool = False
    """Whether most people use it: the short help lists only these options."""


@dataclass(frozen=True, slots=True)
class Field:
    """A knob together with its field."""

    name: str
    type: Any
    """The field's type, without None."""
    optional: bool
    """Whether None is a value."""
    default: Any
    knob: Knob
    owner: Any
    """The dataclass of the field."""

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def is_mapping(self) -> bool:
        """Whether it is given as key=value, and may be repeated."""
        return get_origin(self.type) is collections.abc.Mapping

    @property
    def is_repeated(self) -> bool:
        """Whether it is a list, given as one option for each element."""
        return get_origin(self.type) is collections.abc.Sequence

    @property
    def flags(self) -> tuple[str, ...]:
        return self.knob.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def unit(self) -> str:
        """The placeholder for a value in the help."""
        return self.knob.unit or "|".join(self.choices)

    @property
    def help(self) -> str:
        """The field's docstring, followed by the default if there is one to show."""
        sentence = field_docstrings(self.owner).get(self.name, "")
        default = self.knob.default
        if not default and isinstance(self.default, (int, float, str)) and self.type is not bool:
            default = str(self.default).removesuffix(".0")
        return f"{sentence} Default: {default}." if default else sentence

    def check(self, value: Any) -> Any:
        """Return the value. For an invalid one it raises a UsageError, which names the field, the
        value and the expected values.
        """
        if value is None and self.optional:
            return None
        knob = self.knob
        unit = knob.unit if len(knob.unit) > 1 else ""
        if unit.isupper():
            unit = unit.lower()
        if self.choices:
            chosen(self.name, value, self.choices)
        elif self.type is int:
            return whole(self.name, value, knob.least, unit=unit)
        elif self.type is float:
            converted = number(self.name, value, least=knob.least, above=knob.above, unit=unit)
            if not isinstance(value, int | float):
                return converted
        elif not isinstance(value, _class_of(self.type)):
            expected = {bool: "true or false", str: "a text"}.get(self.type, knob.unit)
            raise UsageError("wrong-value", name=self.name, value=value, expected=expected)
        return value


def knobs(cls: Any) -> Mapping[str, Field]:
    """Return the knobs of a dataclass by name, in the order of its fields."""
    return _knobs(cls)


@cache  # behind `knobs`, because mypy takes some classes for unhashable
def _knobs(cls: Any) -> Mapping[str, Field]:
    annotations = get_type_hints(cls, include_extras=True)
    result = {}
    for field in fields(cls):
        annotation = annotations[field.name]
        if get_origin(annotation) is Annotated:
            annotated, knob = get_args(annotation)
            kind = _without_none(annotated)
            optional = kind is not annotated
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            result[field.name] = Field(field.name, kind, optional, default, knob, cls)
    return result


def _without_none(annotation: Any) -> Any:
    """Return `int` for `int | None`, and `annotation` itself if None is not one of its types."""
    types = get_args(annotation)
    if type(None) not in types:
        return annotation
    return functools.reduce(operator.or_, [kind for kind in types if kind is not type(None)])


def _class_of(annotation: Any) -> Any:
    """Return what isinstance() accepts: `Mapping` for `Mapping[str, str]`."""
    if isinstance(annotation, UnionType):
        return annotation
    return get_origin(annotation) or annotation


def check(configured: object) -> None:
    """Check the value of every knob of `configured`. Raises UsageError for an invalid one."""
    for name, field in knobs(type(configured)).items():
        object.__setattr__(configured, name, field.check(getattr(configured, name)))


def values_of(configured: object, cls: Any) -> dict[str, Any]:
    """Return the values of the fields of `cls`, by name. `configured` is an object of this
    dataclass, or of one derived from it.
    """
    return {field.name: getattr(configured, field.name) for field in fields(cls)}


def whole(
    name: str,
    value: Any,
    least: float = 1,
    *,
    unit: str = "",
    error: type[UsageError] = UsageError,
) -> int:
    """Return `value` as an int. Raises `error` if it is no whole number, or below `least`."""
    with suppress(TypeError):
        index = operator.index(value)
        if index >= least and not isinstance(value, bool):
            return index
    expected = _range("a whole number", unit, {"of at least": least})
    raise error("wrong-value", name=name, value=value, expected=expected)


def number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    unit: str = "",
    error: type[UsageError] = UsageError,
) -> float:
    """Return `value` as a float. Raises `error` if it is no finite number, or out of bounds."""
    numeric = isinstance(value, numbers.Real) and not isinstance(value, bool)
    with suppress(OverflowError):  # an integer that no float can hold
        if numeric and math.isfinite(value) and above < value < below and least <= value <= most:
            return float(value)
    bounds = {"of at least": least, "above": above, "at most": most, "below": below}
    expected = _range("a number", unit, bounds)
    raise error("wrong-value", name=name, value=value, expected=expected)


def _range(kind: str, unit: str, bounds: Mapping[str, float]) -> str:
    """Return text such as "a number of seconds above 0"."""
    limits = [f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound)]
    text = f"{kind} of {unit}" if unit else kind
    return f"{text} {' and '.join(limits)}" if limits else text


def chosen(
    name: str, value: Any, choices: Iterable[Any], *, error: type[UsageError] = UsageError
) -> None:
    """Raise `error` if `value` is not one of the choices."""
    listed = list(choices)
    if value not in listed:
        raise error("unknown-choice", name=name, value=value, choices=listed)


def known(choices: Iterable[str], names: Iterable[str], source: str, kind: str = "option") -> None:
    """Raise a UsageError for an unknown name. The error suggests the closest known name.

    Args:
        choices: the known names.
        names: the names to check.
        source: where the names come from, for the error message.
        kind: what the names stand for, for the error message.
    """
    listed = list(choices)
    for name in names:
        if name not in listed:
            close = get_close_matches(name, listed, 1)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(listed)}"
            raise UsageError("unknown-name", where=source, what=kind, name=name, meant=meant)


def closest(name: str, choices: Iterable[str]) -> str:
    """Return text such as " (did you mean 'digits'?)", or "" if no choice is close."""
    close = get_close_matches(name, list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def pairs(texts: Iterable[str], source: str) -> dict[str, str]:
    """Return the names and values in ["name=value", ...]. Raises UsageError for a text without "=",
    and for a name that is given twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError("not-a-pair", where=source, text=text)
        if name in values:
            raise UsageError("given-twice", where=source, name=name)
        values[name] = value
    return values


@contextmanager
def within(source: str) -> Iterator[None]:
    """Add `source`, the enclosing option or a file, to the message of a UsageError in the block."""
    try:
        yield
    except UsageError as error:
        raise error.within(source) from None


def text_of(number: float) -> str:
    """Return the shortest text that `value_of` reads as the same number."""
    text = f"{number:g}"
    return text if float(text) == number else repr(number)


def value_of(text: str) -> int | float | str:
    """Return the text as a number if it is one, else unchanged. `whole` and `number` check it."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
