"""Batches that are fetched, and on their way to the device, before anyone asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lockstep.data.device import tensors_in, to_device


class Copies(Protocol):
    """How batches reach the device."""

    ahead: bool
    """Whether it pays to start before a batch is asked for."""

    def start(self, batch: Any) -> Any:
        """Begin to copy; returns what `arrive` takes."""
        ...

    def arrive(self, started: Any) -> Any:
        """The batch on its device, safe to use by what comes next on the device's current
        stream.
        """
        ...


class WhenAsked:
    """Copies at the moment that the batch is asked for: for the CPU, where that costs nothing,
    and devices without streams.
    """

    ahead = False

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._device, self._pinned = device, pinned

    def start(self, batch: Any) -> Any:
        return batch

    def arrive(self, started: Any) -> Any:
        return to_device(started, self._device, non_blocking=self._pinned)


class OnStream:
    """Copies on a CUDA stream of its own, beside the computation.

    `record_stream` tells the allocator that memory of one stream is used on another; without it,
    the memory would be given out again too early. What moves itself (`.to`), whose tensors cannot be seen, is
    therefore copied when it is asked for, on the stream that computes.
    """

    ahead = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)

    def start(self, batch: Any) -> Any:
        with self._cuda.stream(self._stream):
            moved = to_device(batch, self._device, non_blocking=True, only_visible=True)
        return moved, self._stream.record_event()

    def arrive(self, started: Any) -> Any:
        moved, copied = started
        computing = self._cuda.current_stream(self._device)
        computing.wait_event(copied)
        for tensor in tensors_in(moved):
            if tensor.device.type == self._device.type:
                tensor.record_stream(computing)
        return to_device(moved, self._device, non_blocking=True)


def copies_to(device: torch.device, *, pinned: bool) -> Copies:
    return OnStream(device) if device.type == "cuda" else WhenAsked(device, pinned=pinned)


class Ahead:
    """A queue of fetched batches. An error in fetching one is raised when that one is asked for,
    not before.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._queue: deque[tuple[Any, Exception | None]] = deque()

    def fill(self, count: int, fetch: Callable[[], Any]) -> None:
        """Fetch until `count` batches wait, and begin to copy them. After a failed one nothing
        is fetched: its successors are lost.
        """
        while len(self._queue) < count and not (self._queue and self._queue[-1][1]):
            try:
                self._queue.append((self._copies.start(fetch()), None))
            except Exception as error:
                self._queue.append((None, error))

    def take(self, fetch: Callable[[], Any]) -> Any:
        """The next batch, on its device."""
        started, error = (
            self._queue.popleft() if self._queue else (self._copies.start(fetch()), None)
        )
        if error is not None:
            raise error
        return self._copies.arrive(started)
