"""A knob is a field of a frozen dataclass that defines an option: type, default, help, unit, group.

    epochs: Annotated[int | None, Knob("run", least=1, default="the task's own")] = None

The help is the string under the field, one sentence. The command line (cli/options.py), --config
files, settings.json, the reference (docs/reference/options.md) and the checks of all values use
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
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

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
    def _kind(self) -> Any:
        return self.type if isinstance(self.type, UnionType) else get_origin(self.type) or self.type

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
        told = self.knob.default or (
            ""
            if self.default is None or self.type is bool or self.is_mapping or self.is_repeated
            else f"{self.default:g}"
            if isinstance(self.default, float)
            else str(self.default)
        )
        sentence = field_docstrings(self.owner).get(self.name, "")
        return f"{sentence} Default: {told}." if told else sentence

    def check(self, value: Any) -> Any:
        """Return the value. For an invalid one it raises a UsageError, which names the field, the
        value and the expected values.
        """
        if value is None and self.optional:
            return None
        unit = self.knob.unit.lower() if self.knob.unit.isupper() else self.knob.unit
        unit = unit if len(unit) > 1 else ""
        if self.choices:
            chosen(self.name, value, self.choices)
        elif self.type is int:
            return whole(self.name, value, self.knob.least, unit=unit)
        elif self.type is float:
            found = number(
                self.name, value, least=self.knob.least, above=self.knob.above, unit=unit
            )
            return value if isinstance(value, int | float) else found
        elif not isinstance(value, self._kind):
            expected = {bool: "true or false", str: "a text"}.get(self.type, self.knob.unit)
            raise UsageError("wrong-value", name=self.name, value=value, expected=expected)
        return value


def knobs(cls: Any) -> Mapping[str, Field]:
    """Return the knobs of a dataclass by name, in the order of its fields."""
    return _knobs(cls)


@cache
def _knobs(cls: Any) -> Mapping[str, Field]:
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for each in fields(cls):
        hint = hints[each.name]
        knob = (
            next((extra for extra in get_args(hint)[1:] if isinstance(extra, Knob)), None)
            if get_origin(hint) is Annotated
            else None
        )
        if knob is not None:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            kind, optional = _without_none(get_args(hint)[0])
            found[each.name] = Field(each.name, kind, optional, default, knob, cls)
    return found


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    kinds = [each for each in get_args(hint) if each is not type(None)]
    return functools.reduce(operator.or_, kinds), len(kinds) < len(get_args(hint))


def check(configured: object) -> None:
    """Check the value of every knob of `configured`. Raises UsageError for an invalid one."""
    for name, field in knobs(type(configured)).items():
        object.__setattr__(configured, name, field.check(getattr(configured, name)))


def whole(
    name: str,
    value: Any,
    least: float = 1,
    *,
    unit: str = "",
    error: type[UsageError] = UsageError,
) -> int:
    """Return `value` as an int. Raises `error` if it is no whole number, or below `least`."""
    try:
        if not isinstance(value, bool) and operator.index(value) >= least:
            return operator.index(value)
    except TypeError:
        pass
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
    limits = [f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound)]
    return " ".join(filter(None, [kind, unit and f"of {unit}", " and ".join(limits)]))


def chosen(
    name: str, value: Any, choices: Iterable[Any], *, error: type[UsageError] = UsageError
) -> None:
    """Raise `error` if `value` is not one of the choices."""
    every = list(choices)
    if value not in every:
        raise error("unknown-choice", name=name, value=value, choices=every)


def known(names: Iterable[str], given: Iterable[str], where: str, what: str = "option") -> None:
    """Raise a UsageError for an unknown name. The error suggests the closest known name.

    Args:
        names: the known names.
        given: the names to check.
        where: the place in which the names were given, for the error message.
        what: what the names stand for, for the error message.
    """
    every = list(names)
    for name in given:
        if name not in every:
            near = get_close_matches(name, every, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(every)}"
            raise UsageError("unknown-name", where=where, what=what, name=name, meant=meant)


def closest(name: str, known: Iterable[str]) -> str:
    """Return text such as " (did you mean 'digits'?)", or "" if no known name is close."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def pairs(texts: Iterable[str], where: str) -> dict[str, str]:
    """Return the names and values in ["name=value", ...]. Raises UsageError for a text without "=",
    and for a name that is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError("not-a-pair", where=where, text=text)
        if name.strip() in found:
            raise UsageError("given-twice", where=where, name=name.strip())
        found[name.strip()] = value
    return found


@contextmanager
def within(where: str) -> Iterator[None]:
    """Add `where` to the message of a UsageError in the block: the enclosing option, or a file."""
    try:
        yield
    except UsageError as error:
        raise error.within(where) from None


def value_of(text: str) -> int | float | str:
    """Return the text as a number if it is one, else unchanged. `whole` and `number` check it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
