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

    return _beginning(incomplete, [*BUNDLED, *sorted(map(str, Path().glob("*.py")))])


def runs(incomplete: str) -> list[str]:
    """Complete `latest` and the run directories under runs/."""
    directories = sorted(str(file.parent) for file in Path("runs").glob("*/settings.json"))
    if directories:
        directories.insert(0, "latest")
    return _beginning(incomplete, directories)


def codes(incomplete: str) -> list[str]:
    """Complete the codes of errors."""
    from lockstep.errors import catalog

    return _beginning(incomplete, sorted(catalog()))


def choices(unit: str) -> Completion | None:
    """Return a completion of auto, cpu and powersgd: for the unit `auto|cpu|powersgd:RANK`. Return
    None for a unit without such words.
    """
    words = [re.split(r"\[|(?<=:)[A-Z]", form)[0] for form in unit.split("|")]
    fixed = [word for word in words if re.fullmatch(r"[a-z\d]*[a-z][\w:-]*", word)]
    if "|" not in unit or not fixed:
        return None
    return lambda incomplete: _beginning(incomplete, fixed)


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
