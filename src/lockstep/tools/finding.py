"""What one check of `lockstep doctor` or `lockstep audit` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warn", "fix", "WRONG"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check: a line of the output."""

    name: str
    value: str
    """What the check found, with figures."""
    level: Level = "ok"
    """note: worth knowing; warn: training works, but slower or with a risk; fix: training will
    not work; WRONG: `audit` found an error in the data set or its order.
    """
    fix: str = ""
    """A sentence that says what is wrong and what to do; "" if nothing is, or if `value` says
    it.
    """


def judged(name: str, value: str, *, fix: str = "", warn: str = "") -> Finding:
    """Return a finding of level "fix" or "warn" if that sentence is given, otherwise "ok"."""
    return Finding(
        name=name, value=value, level="fix" if fix else "warn" if warn else "ok", fix=fix or warn
    )


def ok(name: str, value: str) -> Finding:
    return Finding(name=name, value=value)


def note(name: str, value: str) -> Finding:
    return Finding(name=name, value=value, level="note")


def wrong(name: str, value: str) -> Finding:
    return Finding(name=name, value=value, level="WRONG")
