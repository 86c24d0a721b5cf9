"""The machine that figures are measured on: its kind of device, and the peak memory of this process."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.errors import UsageError

if TYPE_CHECKING:
    import torch


def kind_of_device(device: str = "auto") -> Literal["cpu", "cuda"]:
    """Return the kind of device on which ranks would compute."""
    import torch

    return "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"


class Peak:
    """Measures the peak memory use since its creation. `mib()` is the rise over the use at its
    creation. Pages shared with other ranks count.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Start to measure the device's memory if it is a GPU, otherwise the host's. Raises
        UsageError if the system does not report it.
        """
        self._device = device if device is not None and device.type == "cuda" else None
        gc.collect()
        if self._device is not None:
            import torch  # the sampler benchmark measures a process without torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError, AttributeError):
            # The C library keeps freed memory; using it again would not count as a rise.
            ctypes.CDLL(None).malloc_trim(0)
        try:
            # Reset the peak: imports or the parent process may have set it.
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
    """Return the bytes in line `name` of a table in /proc. Raises UsageError if there is no such
    table.
    """
    try:
        lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise UsageError("memory-not-measured", file=file, reason=error.strerror) from error
    line = next(line for line in lines if line.startswith(f"{name}:"))
    kib = int(line.split()[1])
    return 1024 * kib
