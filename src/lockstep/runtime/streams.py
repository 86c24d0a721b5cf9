"""This process's stdin, stdout and stderr, and how text is written to them."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def open_closed_streams() -> None:
    """Open /dev/null as stdin, stdout and stderr where they are closed, as in a daemon. Otherwise
    the next file that is opened would get such a number, and ranks would use it as a stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # os.open returns the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:  # Python found it closed
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 - stays open
            setattr(sys, name, stream)


def plain(text: str) -> str:
    """Return a text with its control characters escaped, apart from tabs and ends of lines. What
    another program has written must not draw on the terminal.
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def escape_what_is_not_printable() -> None:
    """Print as \\xfc what the locale's encoding lacks, as Python's stderr does: a name of the user's
    must not end a command. For Lockstep's own programs; a user's script keeps Python's stdout.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def spans(numbers: Iterable[int]) -> str:
    """Write numbers of ranks or cores as `0-7`, `3` or `0,2-5`."""
    parts: list[str] = []
    first = last = -2
    for number in sorted(numbers):
        if number == last + 1:
            parts[-1] = f"{first}-{number}"
        else:
            first = number
            parts.append(str(number))
        last = number
    return ",".join(parts)
