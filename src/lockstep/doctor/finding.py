"""What one check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warn", "fix"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line of the report."""

    name: str
    value: str
    """What is there, with figures."""
    level: Level = "ok"
    """warn: training works, but slower or with a risk; fix: it will not work as it is."""
    fix: str = ""
    """What is wrong and what to do, as a sentence; "" where all is well."""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def judged(name: str, value: str, *, fix: str = "", warn: str = "") -> Finding:
    """A finding whose level follows from which sentence there is."""
    return Finding(name=name, value=value, level="fix" if fix else "warn" if warn else "ok", fix=fix or warn)
