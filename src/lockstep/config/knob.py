"""A knob: a field of a frozen dataclass that says, once, its type, default, help, unit and group.

    epochs: Annotated[int | None, Knob("run", least=1, default="the task's own")] = None

The help is the string under the field, one sentence. Read from here: the command line
(cli/options.py), --config files, settings.json, the reference (docs/reference/options.md), and the
checks that every value goes through, wherever it came from.

Below them, the checks of a single value that all rooms share: `whole`, `number`, `chosen`, `known`,
`pairs`.
"""

from __future__ import annotations

import collections.abc
import functools
import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    """What a field's annotation says beside its type."""

    group: Group
    unit: str = ""
    """What a value is, as the help shows it: STEPS, SECONDS, DIR; where a text is one of a few
    forms, these: auto|2,1,1.
    """
    default: str = ""
    """In words, where the field's own default says too little."""
    flags: tuple[str, ...] = ()
    """On the command line, in place of --name."""
    least: float = -math.inf
    above: float = -math.inf
    common: bool = False
    """Whether it is among those that most people use, and so in the short help."""
    tuned: bool = False
    """Whether `lockstep tune` looks for its fastest value."""


@dataclass(frozen=True, slots=True)
class Field:
    """A knob in its place."""

    name: str
    type: Any
    """Without None."""
    optional: bool
    """Whether None is a value."""
    default: Any
    knob: Knob
    owner: Any
    """The dataclass."""

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def is_mapping(self) -> bool:
        """Whether it is given as key=value, several times."""
        return get_origin(self.type) is collections.abc.Mapping

    @property
    def is_repeated(self) -> bool:
        """Whether it is a list, an option for each."""
        return get_origin(self.type) is collections.abc.Sequence

    @property
    def _kind(self) -> Any:
        return self.type if isinstance(self.type, UnionType) else get_origin(self.type) or self.type

    @property
    def flags(self) -> tuple[str, ...]:
        return self.knob.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def unit(self) -> str:
        """As help shows what a value is."""
        return self.knob.unit or "|".join(self.choices)

    @property
    def help(self) -> str:
        """The sentence, and the default where there is one to tell."""
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
        """The value. Raises UsageError, naming the field, the value and what is expected, for one
        that it cannot have.
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
            raise UsageError("wrong-type", name=self.name, value=value, expected=expected)
        return value


def knobs(cls: Any) -> Mapping[str, Field]:
    """The knobs of a dataclass, in their order."""
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
    """Look at every knob's value. Raises UsageError."""
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
    """`value` as an int. Raises `error` for what is not a whole number, or is below `least`."""
    try:
        if not isinstance(value, bool) and operator.index(value) >= least:
            return operator.index(value)
    except TypeError:
        pass
    expected = _range("a whole number", unit, {"of at least": least})
    raise error("not-a-whole-number", name=name, value=value, expected=expected)


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
    """`value` as a float. Raises `error` for what is not a finite number, or lies outside the bounds."""
    numeric = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if numeric and math.isfinite(value) and above < value < below and least <= value <= most:
        return float(value)
    bounds = {"of at least": least, "above": above, "at most": most, "below": below}
    expected = _range("a number", unit, bounds)
    raise error("number-out-of-range", name=name, value=value, expected=expected)


def _range(kind: str, unit: str, bounds: Mapping[str, float]) -> str:
    limits = [f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound)]
    return " ".join(filter(None, [kind, unit and f"of {unit}", " and ".join(limits)]))


def chosen(
    name: str, value: Any, choices: Iterable[Any], *, error: type[UsageError] = UsageError
) -> None:
    """Raise `error` for a value that is none of the choices."""
    every = list(choices)
    if value not in every:
        raise error("unknown-choice", name=name, value=value, choices=every)


def known(names: Iterable[str], given: Iterable[str], where: str, what: str = "option") -> None:
    """Raise a UsageError for a name that is not known, with the nearest one that is.

    Args:
        names: that are known.
        given: names to look at.
        where: they were given, for the error's sentence.
        what: the names are names of.
    """
    every = list(names)
    for name in given:
        if name not in every:
            near = get_close_matches(name, every, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(every)}"
            raise UsageError("unknown-name", where=where, what=what, name=name, meant=meant)


def closest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'digits'?)", or nothing where no known name is close."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def pairs(texts: Iterable[str], where: str) -> dict[str, str]:
    """Of ["name=value", ...]. Raises UsageError for one without "=", and for a name given twice."""
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
    """What is refused in the block is said of `where`: an option inside an option, a file."""
    try:
        yield
    except UsageError as error:
        raise error.within(where) from None


def value_of(text: str) -> int | float | str:
    """A number where the text is one, for `whole` and `number` to look at."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
