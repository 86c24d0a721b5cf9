"""Numbers on their way from a device to the host, waited for where somebody looks at them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lockstep.collectives.group import Work


class Reading:
    """What `values` holds when the work queued so far is done. `values` must not change afterwards.

    On a GPU the numbers are copied to pinned memory behind that work, and only `list()` waits, for the copy alone: what was queued later
    goes on meanwhile. `work`, a collective under way on `values`, is waited for by the copy and not by the current stream.
    """

    def __init__(self, values: Tensor, work: Work | None = None) -> None:
        self._values = values.detach()
        self._work = work
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            side = _side_stream(values.device)
            side.wait_stream(torch.cuda.current_stream(values.device))
            with torch.cuda.stream(side):
                self._finish_work()
                self._copy()

    def _finish_work(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def _copy(self) -> None:
        host = torch.empty(self._values.shape, dtype=self._values.dtype, pin_memory=True)
        host.copy_(self._values, non_blocking=True)
        self._values.record_stream(torch.cuda.current_stream(self._values.device))
        self._values = host
        self._copied = torch.cuda.Event()
        self._copied.record()

    def list(self) -> list[float]:
        """The numbers, flat."""
        self._finish_work()
        if self._copied is not None:
            self._copied.synchronize()
        found: list[float] = self._values.reshape(-1).tolist()
        return found


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
