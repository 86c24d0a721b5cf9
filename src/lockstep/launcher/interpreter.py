"""What acts only as an interpreter or a library starts: it cannot be changed in a process that
is forked later.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

_LIBRARIES = r"(?:OMP|GOMP|KMP|MKL|OPENBLAS|TRITON|ATEN|PYTORCH|TORCH(?!ELASTIC))_?[A-Z0-9_]*"
_ACTS_AT_START = re.compile(rf"PYTHON|LD_|MALLOC_|GLIBC_|{_LIBRARIES}")
_SET_BY_SCRIPT = re.compile(
    rf"""(?:environ\s*\[|setdefault\(|putenv\()\s*["']({_LIBRARIES})["']|environ\.update\([^)]*?\b({_LIBRARIES})\b"""
)


def acting(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """The variables that act as an interpreter or a library starts: for other values of them
    there must be another server.
    """
    return sorted(
        (name, value) for name, value in environment.items() if _ACTS_AT_START.match(name)
    )


def set_by(script: Path) -> str:
    """The first variable that a script sets itself and that acts as a library starts; "" for
    none, and where the file is no text.
    """
    try:
        found = _SET_BY_SCRIPT.search(script.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if found is None else found[1] or found[2]


def flags() -> list[str]:
    """This interpreter's own, for another one; but for -P, which whoever starts one gives it as
    the program needs it.
    """
    import subprocess

    known: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    options = [
        name if value is True else f"{name}={value}" for name, value in sys._xoptions.items()
    ]
    known = [flag for flag in known if flag != "-P"]
    return [*known, *(part for option in options if option not in known for part in ("-X", option))]


def forks(environment: Mapping[str, str]) -> bool:
    """Whether ranks may be forked by an interpreter like this one: it is CPython on Linux, and
    nobody watches its imports.
    """
    watched = (
        sys.flags.verbose
        or "importtime" in sys._xoptions
        or (environment.get("PYTHONPROFILEIMPORTTIME") and not sys.flags.ignore_environment)
    )
    return sys.platform == "linux" and sys.implementation.name == "cpython" and not watched
