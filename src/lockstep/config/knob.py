"""A knob: a field of a frozen dataclass that says, once, its type, default, help, unit and group.

    epochs: Annotated[int | None, Knob("run", least=1, default="the task's own")] = None

The help is the string under the field, one sentence. Read from here: the command line
(cli/options.py), --config files, settings.json, the reference (docs/guide/options.md), and the
checks that every value goes through, wherever it came from.
"""

from __future__ import annotations

import collections.abc
import functools
import math
import operator
from collections.abc import Iterable, Mapping
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
            else str(self.default)
        )
        sentence = field_docstrings(self.owner).get(self.name, "")
        return f"{sentence} Default: {told}." if told else sentence

    def check(self, value: object) -> None:
        """Raise a UsageError, naming the field, the value and what is expected, for a value that
        it cannot have.
        """
        if value is None and self.optional:
            return
        if self.choices:
            if value not in self.choices:
                raise UsageError(
                    "unknown-choice", name=self.name, value=value, choices=self.choices
                )
        elif self.type in (int, float):
            kinds = int if self.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not self._in_range(value):
                raise UsageError(f"{self.name}={value!r}: give {self._number()}")
        elif not isinstance(value, self._kind):
            raise UsageError(f"{self.name}={value!r}: give {_KINDS.get(self.type, self.knob.unit)}")

    def _in_range(self, value: float) -> bool:
        return math.isfinite(value) and value >= self.knob.least and value > self.knob.above

    def _number(self) -> str:
        kind = "a whole number" if self.type is int else "a number"
        unit = (
            f" of {self.knob.unit.lower() if self.knob.unit.isupper() else self.knob.unit}"
            if len(self.knob.unit) > 1
            else ""
        )
        if self.knob.least > -math.inf:
            return f"{kind}{unit} of at least {self.knob.least:g}"
        return (
            f"{kind}{unit} above {self.knob.above:g}"
            if self.knob.above > -math.inf
            else f"{kind}{unit}"
        )


_KINDS: Mapping[Any, str] = {bool: "true or false", str: "a text"}


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
        field.check(getattr(configured, name))


def known(names: Iterable[str], given: Iterable[str], where: str) -> None:
    """Raise a UsageError for a name that is not known, with the nearest one that is."""
    every = list(names)
    for name in given:
        if name not in every:
            near = get_close_matches(name, every, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(every)}"
            raise UsageError(f"{where}: there is no option {name!r}; {meant}")
