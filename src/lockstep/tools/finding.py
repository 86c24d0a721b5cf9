"""What one check of `lockstep doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fix"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check: a line of the output."""

    name: str
    value: str
    """What the check found, with figures."""
    level: Level = "ok"
    """warn: training works, but slower or with a risk; fix: training will not work."""
    fix: str = ""
    """A sentence that says what is wrong and what to do; "" if nothing is."""


def judged(name: str, value: str, *, fix: str = "", warn: str = "") -> Finding:
    """Return a finding of level "fix" or "warn" if that sentence is given, otherwise "ok"."""
    if fix:
        return Finding(name=name, value=value, level="fix", fix=fix)
    return Finding(name=name, value=value, level="warn" if warn else "ok", fix=warn)
