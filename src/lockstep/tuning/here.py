"""What figures were measured on, and what is free here."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

from lockstep.settings import Device


def backend_of(device: Device) -> str | None:
    """What `lockstep.init` is told for that device; None: what the hardware suggests."""
    return {"auto": None, "cpu": "gloo", "cuda": "nccl"}[device]


def kind_of_device(device: Device = "auto") -> Literal["cpu", "cuda"]:
    """What ranks would compute on."""
    import torch

    return "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"


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


def memory_of_a_rank(ranks: int) -> float | None:
    """Bytes that each of so many ranks of this host has: its GPU's, or an equal part of what is free; None where the system does not say."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    free = free_memory()
    return None if free is None else free / ranks
