"""The machine that figures are measured on: its processor, the memory that is free, and the
memory that this process has used at its peak.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.config.settings import Device
from lockstep.errors import UsageError

if TYPE_CHECKING:
    import torch


def kind_of_device(device: Device = "auto") -> Literal["cpu", "cuda"]:
    """What ranks would compute on."""
    import torch

    return "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"


def free_memory() -> int | None:
    """Bytes that the host can give without swapping; None where the system does not say."""
    try:
        return from_proc("/proc/meminfo", "MemAvailable")
    except UsageError:
        return None


def memory_of_a_rank(ranks: int) -> float | None:
    """Bytes that each of so many ranks of this host has: its GPU's, or an equal part of what is
    free; None where the system does not say.
    """
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    free = free_memory()
    return None if free is None else free / ranks


class Peak:
    """From its making on: `mib()` is by how much use rose, at its peak, over what it was then.
    Pages shared with other ranks count.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Of the host's memory, or, on a device of kind cuda, of its own. Raises UsageError
        where the system does not say.
        """
        self._device = device if device is not None and device.type == "cuda" else None
        gc.collect()
        if self._device is not None:
            import torch  # a sampler's process is measured without it

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError, AttributeError):
            # freed memory that the C library keeps would be used again without being counted
            ctypes.CDLL(None).malloc_trim(0)
        try:
            # forget the peak that the imports reached, or the parent
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            raise UsageError(
                "memory-not-measured", file="/proc/self/clear_refs", reason=error.strerror
            ) from error
        self._before = from_proc("/proc/self/status", "VmRSS")

    def mib(self) -> float:
        if self._device is not None:
            import torch

            return (torch.cuda.max_memory_allocated(self._device) - self._before) / 2**20
        return (from_proc("/proc/self/status", "VmHWM") - self._before) / 2**20


def from_proc(file: str, name: str) -> int:
    """Bytes in the line `name` of one of Linux's tables. Raises UsageError where there is none."""
    try:
        lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise UsageError("memory-not-measured", file=file, reason=error.strerror) from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
