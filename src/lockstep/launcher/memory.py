"""Has the kernel killed for want of memory in this control group?"""

from __future__ import annotations

import re
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def oom_kills(of: Path = Path("/proc/self/cgroup"), groups: Path = _GROUPS) -> int:
    """Processes that were killed so in this process's group since it exists; 0 where the system does not count."""
    try:
        path = next(line for line in of.read_text().splitlines() if line.startswith("0::")).removeprefix("0::").strip("/")
        events = (groups / path / "memory.events").read_text()
    except (OSError, StopIteration):
        return 0
    found = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
    return int(found[1]) if found else 0
