"""The processor's name, the number of cores this process may use, and whether other programs keep
the host busy. On a busy host, measurements include those programs, and threads of a rank wait for
each other.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Return the number of cores that this process can keep busy: those that it may run on, or as
    many whole ones as its control group has the time of. At least 1.
    """
    return max(1, int(min(allowed_cores(), quota())))


def allowed_cores() -> int:
    """Return the number of cores this process may run on; all cores where the system cannot say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(
    of_process: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return how many cores' time this process's control group has, of version 1 or 2, and all the
    groups that it is in; infinity without a limit.
    """
    least = math.inf
    with suppress(OSError):
        for line in of_process.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            root = groups / controllers
            if not controllers or "cpu" in controllers.split(","):
                group = root / path.strip("/")
                for folder in (group, *group.parents):
                    least = min(least, _limit(folder))
                    if folder == root:
                        break
    return least


def _limit(group: Path) -> float:
    """Return one control group's own limit in cores."""
    names = (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])  # of version 2, of version 1
    for files in names:
        with suppress(OSError, ValueError):  # no such file; no limit: "max 100000"
            words = " ".join((group / file).read_text(encoding="ascii") for file in files).split()
            if (microseconds := int(words[0])) > 0:
                return microseconds / int(words[1])
    return math.inf


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
