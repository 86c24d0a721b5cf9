"""What one check of `lockstep doctor` or `lockstep audit` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warn", "fix", "WRONG"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line of the report."""

    name: str
    value: str
    """What is there, with figures."""
    level: Level = "ok"
    """note: worth knowing; warn: training works, but slower or with a risk; fix: it will not
    work as it is; WRONG: it is other than it says.
    """
    fix: str = ""
    """What is wrong and what to do, as a sentence; "" where all is well, and where `value` says
    it.
    """


def judged(name: str, value: str, *, fix: str = "", warn: str = "") -> Finding:
    """A finding whose level follows from which sentence there is."""
    return Finding(
        name=name, value=value, level="fix" if fix else "warn" if warn else "ok", fix=fix or warn
    )


def ok(name: str, value: str) -> Finding:
    return Finding(name=name, value=value)


def note(name: str, value: str) -> Finding:
    return Finding(name=name, value=value, level="note")


def wrong(name: str, value: str) -> Finding:
    return Finding(name=name, value=value, level="WRONG")
