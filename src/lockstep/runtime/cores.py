"""The processor, and how many of its cores this process may use."""

from __future__ import annotations

import os
import platform
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
