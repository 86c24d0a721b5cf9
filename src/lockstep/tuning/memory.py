"""How much memory a piece of training takes at its peak: of the host on Linux, or of this rank's GPU."""

from __future__ import annotations

import resource
import sys

import torch


class Peak:
    """`bytes()` is by how much this process's memory rose, at its peak, since the Peak was made. Pages shared with other ranks count.

    The host's figure is the system's high-water mark, which never falls: it means something in a fresh process only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = self._now()

    def bytes(self) -> int:
        return self._now() - self._before

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
