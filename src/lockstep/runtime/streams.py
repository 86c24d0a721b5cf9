"""This process's stdin, stdout and stderr."""

from __future__ import annotations

import os
import sys


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
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - stays open
