"""Move batches of any structure to a device, without a copy of what is there already. Batches can
be fetched and copied before they are asked for.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, Protocol

import torch

_PLAIN = (str, bytes, int, float, type(None))


def to_device(
    batch: Any, device: torch.device, *, non_blocking: bool = False, only_visible: bool = False
) -> Any:
    """Return the batch with every tensor in it on `device`.

    Moves the tensors in dicts, lists, tuples, named tuples and dataclasses, and objects with a `to`
    method (PackedSequence, BatchEncoding); keeps their types. Does not look into other objects and
    returns them as they are. If all tensors are on `device` already, the same object is returned.
    With `only_visible`, objects with a `to` method are not moved, so that `tensors_in` finds all
    moved tensors. Does not wait for a `non_blocking` copy: the current stream runs later work after
    it anyway.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return batch if only_visible else batch.to(device)
    if isinstance(batch, _PLAIN):
        return batch
    move = partial(to_device, device=device, non_blocking=non_blocking, only_visible=only_visible)
    if isinstance(batch, (list, tuple)):
        items = [move(item) for item in batch]
        if all(new is old for new, old in zip(items, batch, strict=True)):
            return batch
        if hasattr(batch, "_fields"):
            return type(batch)(*items)
        return type(batch)(items)
    if isinstance(batch, Mapping):
        return _with_values(batch, {name: move(value) for name, value in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        moved = {name: move(value) for name, value in fields.items()}
        return batch if _same(moved, fields) else _with_fields(batch, moved)
    return batch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that `to_device(..., only_visible=True)` moves."""
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    if isinstance(batch, (*_PLAIN, type)) or callable(getattr(batch, "to", None)):
        return
    if isinstance(batch, (list, tuple)):
        inside: Iterable[Any] = batch
    elif isinstance(batch, Mapping):
        inside = batch.values()
    elif dataclasses.is_dataclass(batch):
        inside = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    else:
        return
    for item in inside:
        yield from tensors_in(item)


def _same(new: Mapping[Any, Any], old: Mapping[Any, Any]) -> bool:
    return all(new[name] is old[name] for name in new)


def _with_values(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    if _same(moved, batch):
        return batch
    if not isinstance(batch, MutableMapping):
        return moved
    result = copy.copy(batch)
    result.update(moved)
    return result


def _with_fields(batch: Any, moved: dict[str, Any]) -> Any:
    """Return a copy with other field values. dataclasses.replace would run __init__, which may not
    take every field.
    """
    result = copy.copy(batch)
    for name, value in moved.items():
        object.__setattr__(result, name, value)  # works for frozen dataclasses too
    return result


class Copies(Protocol):
    """How batches reach the device."""

    ahead: bool
    """Whether it helps to start a copy before the batch is asked for."""

    def start(self, batch: Any) -> Any:
        """Begin to copy, and return the argument for `arrive`."""
        ...

    def arrive(self, started: Any) -> Any:
        """Return the batch on its device. Later work on the device's current stream may use it."""
        ...


class WhenAsked:
    """Copies a batch when it is asked for. Used for the CPU, where that costs nothing, and for
    devices without streams.
    """

    ahead = False

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._device = device
        self._pinned = pinned
        self._on_cpu = device.type == "cpu"

    def start(self, batch: Any) -> Any:
        return batch

    def arrive(self, started: Any) -> Any:
        if self._on_cpu and type(started) in (list, tuple):
            for item in started:  # nearly always tensors on the CPU
                if type(item) is not torch.Tensor or not item.is_cpu:
                    break
            else:
                return started
        return to_device(started, self._device, non_blocking=self._pinned)


class OnStream:
    """Copies on its own CUDA stream, in parallel with the computation.

    `record_stream` tells the allocator that memory of one stream is used on another. Without it,
    the memory would be reused too early. It needs the tensors, and those in an object with its own
    `to` method cannot be seen. Such an object is copied when it is asked for, on the computing
    stream.
    """

    ahead = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
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
    """A queue of fetched batches. If a fetch fails, `take` raises the error when it reaches that
    batch, not before.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._queue: deque[tuple[Any, Exception | None]] = deque()

    def fill(self, count: int, fetch: Callable[[], Any]) -> None:
        """Fetch batches until the queue has `count`, and begin to copy them. After a failed batch
        nothing is fetched, because the batches after it are lost.
        """
        while len(self._queue) < count and not (self._queue and self._queue[-1][1]):
            try:
                self._queue.append((self._copies.start(fetch()), None))
            except Exception as error:
                self._queue.append((None, error))

    def take(self, fetch: Callable[[], Any]) -> Any:
        """Return the next batch, on its device."""
        if not self._queue:
            return self._copies.arrive(self._copies.start(fetch()))
        started, error = self._queue.popleft()
        if error is not None:
            raise error
        return self._copies.arrive(started)
