"""What figures were measured on, and what is free here."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from lockstep.settings import Device


def backend_of(device: Device) -> str | None:
    """What `lockstep.init` is told for that device; None: what the hardware suggests."""
    return {"auto": None, "cpu": "gloo", "cuda": "nccl"}[device]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu() -> str:
    """The processor's name as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def free_memory() -> int | None:
    """Bytes that the host can give without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
