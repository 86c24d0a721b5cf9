"""The processor's name, the number of cores this process may use, and whether other programs keep
the host busy. On a busy host, measurements include those programs, and threads of a rank wait for
each other.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
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
            limit, period = (int(word) for word in words[:2])
            if limit > 0:
                return limit / period
    return math.inf


def processor() -> str:
    """Return the processor's name, as the system gives it."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def running(own: int = 1) -> int:
    """Return how many programs keep cores busy beside this one: the fewest that run in five looks
    within a tenth of a second. 0 where the system cannot say.

    Args:
        own: processes of ours that run meanwhile.
    """
    # tests set the variable, so that the host's real load does not matter
    file = Path(os.environ.get("LOCKSTEP_LOADAVG", "/proc/loadavg"))
    seen = []
    for _ in range(5):
        with suppress(OSError, ValueError, IndexError):  # not Linux
            words = file.read_text(encoding="ascii").split()
            seen.append(int(words[3].partition("/")[0]) - own)
        time.sleep(0.02)
    return max(0, min(seen, default=0))


def busy() -> str | None:
    """Return "3 other programs run on 2 cores" if these are at least as many. Else None."""
    programs = running()
    cores = os.cpu_count() or 1
    if programs < cores:
        return None
    run = "programs run" if programs > 1 else "program runs"
    return f"{programs} other {run} on {cores} core{'s' * (cores != 1)}"


def warn_if_busy() -> None:
    """Print a warning to stderr if the host is busy. Commands that measure call it before they
    start anything.
    """
    others = busy()
    if others is not None:
        text = (
            f"warning: {others}: other programs slow down the measurement. Measure again on an idle"
            " host"
        )
        print(text, file=sys.stderr, flush=True)
