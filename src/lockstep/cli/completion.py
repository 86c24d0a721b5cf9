"""Completion with the Tab key, beyond the names of commands and options: values of options, tasks,
run directories, error codes.

A function here gets the part of the word that is typed. If it finds nothing, the shell completes
file names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

Completion = Callable[[str], list[str]]


def tasks(incomplete: str) -> list[str]:
    """Complete the bundled tasks and the Python files of this folder."""
    from lockstep.training.resolve import BUNDLED

    return _begun(incomplete, [*BUNDLED, *sorted(map(str, Path().glob("*.py")))])


def runs(incomplete: str) -> list[str]:
    """Complete `latest` and the run directories under runs/."""
    found = sorted(str(file.parent) for file in Path("runs").glob("*/settings.json"))
    return _begun(incomplete, [*(["latest"] if found else []), *found])


def codes(incomplete: str) -> list[str]:
    """Complete the codes of errors."""
    from lockstep.errors import catalog

    return _begun(incomplete, sorted(catalog()))


def choices(unit: str) -> Completion | None:
    """Return a completion of auto, cpu and powersgd: for the unit `auto|cpu|powersgd:RANK`. Return
    None for a unit without such words.
    """
    words = [re.split(r"\[|(?<=:)[A-Z]", each)[0] for each in unit.split("|")]
    fixed = [word for word in words if re.fullmatch(r"[a-z\d]*[a-z][\w:-]*", word)]
    return (lambda incomplete: _begun(incomplete, fixed)) if "|" in unit and fixed else None


def _begun(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
