"""How many cores this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Those that it may run on, where the system can say so; else those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
