"""The processor's name, the number of cores this process may use, and whether other programs keep
the host busy. On a busy host, measurements include those programs, and threads of a rank wait for
each other.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Return the number of cores this process may run on; all cores where the system cannot say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the processor's name, as the system gives it."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def busy() -> str | None:
    """ "load 6.2 on 2 cores" if at least as many programs run as the host has cores, now and on
    average over the last minute. Else None.
    """
    cores = os.cpu_count() or 1
    # tests set the variable, so that the host's real load does not matter
    file = os.environ.get("LOCKSTEP_LOADAVG", "/proc/loadavg")
    try:
        words = Path(file).read_text(encoding="ascii").split()
        load, running = float(words[0]), int(words[3].partition("/")[0]) - 1  # without this process
    except (OSError, ValueError, IndexError):  # not Linux
        load = os.getloadavg()[0]
        running = cores
    return (
        f"load {load:.1f} on {cores} core{'s' * (cores != 1)}"
        if load >= cores and running >= cores
        else None
    )


def warn_if_busy() -> None:
    """Print a warning to stderr if the host is busy. Commands that measure call it before they
    start anything.
    """
    found = busy()
    if found is not None:
        print(
            f"warning: {found}: other programs slow down the measurement. Measure again on an idle"
            " host",
            file=sys.stderr,
            flush=True,
        )
