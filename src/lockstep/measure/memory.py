"""How much memory this process has used at its peak: of the host on Linux, or of its GPU."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import UsageError

if TYPE_CHECKING:
    import torch


class Peak:
    """From its making on: `mib()` is by how much use rose, at its peak, over what it was then. Pages shared with other ranks count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            import torch  # a sampler's process is measured without it

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError, AttributeError):  # freed memory that the C library keeps would be used again without being counted
            ctypes.CDLL(None).malloc_trim(0)
        self._before = fresh_peak()

    def mib(self) -> float:
        if self._device.type == "cuda":
            import torch

            return (torch.cuda.max_memory_allocated(self._device) - self._before) / 2**20
        return (from_proc("/proc/self/status", "VmHWM") - self._before) / 2**20


def fresh_peak() -> int:
    """Forget the peak of the resident set (which the imports reached, or the parent), and return what it is now, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise UsageError(f"/proc/self/clear_refs cannot be written ({error.strerror}): memory is measured on Linux only") from error
    return from_proc("/proc/self/status", "VmRSS")


def from_proc(file: str, name: str) -> int:
    """Bytes in the line `name` of one of Linux's tables."""
    try:
        lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror}): memory is measured on Linux only") from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
