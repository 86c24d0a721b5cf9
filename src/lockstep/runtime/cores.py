"""The processor, how many of its cores this process may use, and whether other programs keep the
host busy: then measurements are of them too, and threads of one rank wait for each other.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Those that it may run on, where the system can say so; else those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Its name as the system has it."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# a test's host must not be busier at one time than at another
_FILE = Path(os.environ.get("LOCKSTEP_LOADAVG", "/proc/loadavg"))


def busy(file: Path = _FILE) -> str | None:
    """ "load 6.2 on 2 cores" where at least as many programs run as the host has cores, and did
    so for most of the last minute. Else None.
    """
    cores = os.cpu_count() or 1
    try:
        words = file.read_text(encoding="ascii").split()
        load, running = float(words[0]), int(words[3].partition("/")[0]) - 1  # without this process
    except (OSError, ValueError, IndexError):  # no Linux
        load = os.getloadavg()[0]
        running = cores
    return (
        f"load {load:.1f} on {cores} core{'s' * (cores != 1)}"
        if load >= cores and running >= cores
        else None
    )


def warn_if_busy() -> None:
    """One line on stderr, for commands that measure; call it before anything is started."""
    found = busy()
    if found is not None:
        print(
            f"warning: {found}: other programs slow down the measurement. Measure again on an idle"
            " host",
            file=sys.stderr,
            flush=True,
        )
