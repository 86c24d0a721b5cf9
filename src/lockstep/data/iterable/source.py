"""How a loader process reads an iterable dataset: forward only, micro-batch by micro-batch, with
its own random stream.

torch's DataLoader is used in map style, with requests in place of indices. In its iterable style
the order in which workers report their end is not reliable, and the epoch cannot be given.
"""

from __future__ import annotations

import copy
import inspect
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from lockstep.data.iterable.sharding import Sharding, seen_by_dataset
from lockstep.data.keyed import collated, fetcher_name
from lockstep.runtime import randomness

COMPARED = 8  # first items of a stream that ranks compare, to check that they read the same stream
UNKNOWN = -1
_WHOLE_WALK = -1  # the "index" in the key of a walk's random stream


class Saved:
    """The state of a dataset with `state_dict`, after `position` items of the stream. It is a plain
    class, so that it is neither pinned nor moved to a device.
    """

    def __init__(self, position: int, dataset: Any, random: Any) -> None:
        self.position = position
        self.dataset = dataset
        self.random = random

    def plain(self) -> dict[str, Any]:
        return {"position": self.position, "dataset": self.dataset, "random": self.random}


class Request(NamedTuple):
    """A request for one micro-batch, in walk number `walk`."""

    epoch: int
    positions: range
    """Positions of its items in the stream that the requested process reads."""
    walk: int
    saved: Saved | None
    """The state from which the walk may begin, in place of the stream's first item."""


class Reply(NamedTuple):
    """A micro-batch of `items` items. At the stream's end it has fewer than requested, or none;
    `batch` is then None.
    """

    batch: Any
    items: int
    total: int
    """Items of the stream if it has ended, else UNKNOWN."""
    digest: int
    """Digest of the stream's first items, once they have been read; else UNKNOWN."""
    saved: Saved | None


class StreamSource(Dataset[Any]):
    """Answers requests; every loader process holds one. With `whole_only`, a short micro-batch at
    the stream's end is left out.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        *,
        sharding: Sharding,
        rank: int,
        size: int,
        whole_only: bool,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate or collated
        self._sharding = sharding
        self._rank = rank
        self._size = size
        self._whole_only = whole_only
        self._resumes = resumes(dataset)
        self._walk: _Walked | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_walk": None}

    def __getitems__(self, request: Request) -> Reply:
        # before seen_by_dataset hides the worker
        worker = get_worker_info()
        fetcher = fetcher_name(self._rank)
        with (
            randomness.preserved(),
            seen_by_dataset(self._sharding, self._rank, self._size),
            self._naming_position(request.epoch, fetcher),
        ):
            if self._walk is None or self._walk.number != request.walk:
                self._walk = None  # the old iterator goes first
                if worker is not None:
                    _unshare_epoch(self._dataset)
                self._walk = _Walked(self._dataset, request, self._seed)
            walk = self._walk
            items = walk.take(request.positions)
            if self._whole_only and len(items) < len(request.positions):
                items = []
            saved = walk.saved() if self._resumes else None
            randomness.collate(self._seed, request.epoch, self._number(request.positions.start))
            batch = self._collate(items) if items else None
        return Reply(batch, len(items), walk.total, walk.digest, saved)

    def _number(self, start: int) -> int:
        """Return a number that differs between the micro-batches of all processes."""
        if self._sharding == "items":
            return start
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (start * self._size + self._rank) * workers + number

    @contextmanager
    def _naming_position(self, epoch: int, fetcher: str) -> Iterator[None]:
        """Add the position in the stream to an error of this block."""
        try:
            yield
        except Exception as error:
            read = 0 if self._walk is None else self._walk.position
            error.add_note(
                f"This was {type(self._dataset).__name__}, in epoch {epoch}, {fetcher}, after"
                f" {read} of its items."
            )
            raise


def resumes(dataset: Any) -> bool:
    """Whether the dataset has `state_dict()` and `load_state_dict(state)`, as torch's stateful
    datasets do.

    Methods of these names that need other arguments do not count. mosaicml's StreamingDataset, for
    example, needs the number of samples that its own loader has yielded.
    """
    return _callable_with(dataset, "state_dict") and _callable_with(dataset, "load_state_dict", {})


def _callable_with(dataset: Any, name: str, *arguments: Any) -> bool:
    method = getattr(dataset, name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        pass
    return True


class _Walked:
    """One walk through the dataset, and its position."""

    def __init__(self, dataset: Any, request: Request, seed: int) -> None:
        self.number = request.walk
        self.position = 0
        self.total = self.digest = UNKNOWN
        self._dataset = dataset
        self._crc = 0
        self._compares = request.saved is None  # only such a walk begins with the first item
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(request.epoch)
        randomness.sample(seed, request.epoch, _WHOLE_WALK)
        if request.saved is not None:
            dataset.load_state_dict(copy.deepcopy(request.saved.dataset))
            self.position = request.saved.position
            _restore(request.saved.random)
        self._items: Iterator[Any] = iter(dataset)
        self._random = _capture()

    def take(self, positions: range) -> list[Any]:
        """Return the items at these positions. Items before them are read and discarded."""
        _restore(self._random)
        while self.position < positions.start and self._next() is not None:
            pass
        items = [item for (item,) in islice(iter(self._next, None), len(positions))]
        self._random = _capture()
        return items

    def _next(self) -> tuple[Any] | None:
        """Return the next item in a tuple, or None at the end."""
        if self.total != UNKNOWN:
            return None
        for item in self._items:
            if self._compares and self.position < COMPARED:
                self._crc = _digest(item, self._crc)
            self.position += 1
            if self._compares and self.position == COMPARED:
                self.digest = self._crc
            return (item,)
        self.total = self.position
        self._items = iter(())
        return None

    def saved(self) -> Saved:
        return Saved(self.position, copy.deepcopy(self._dataset.state_dict()), self._random)


def _unshare_epoch(dataset: Any) -> None:
    """Give a loader worker its own copy of the epoch, in its dataset and in one that this wraps.

    Hugging Face's datasets keep the epoch in a tensor that all workers share, and `set_epoch` adds
    the difference to it. Two workers that do so at once add it twice. They would then read the
    shards of different epochs.
    """
    for holder in (dataset, *getattr(dataset, "__dict__", {}).values()):
        attributes = getattr(holder, "__dict__", {})
        for name in ("epoch", "_epoch"):
            value = attributes.get(name)
            if isinstance(value, torch.Tensor) and value.is_shared():
                attributes[name] = value.clone()


def _digest(item: Any, before: int) -> int:
    """Return the CRC `before`, extended by the item: by its value if processes can compare it, else
    by its type.
    """
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu()
        item = item.numpy() if item.dtype is not torch.bfloat16 else item.float().numpy()
    if isinstance(item, np.ndarray) and item.dtype != object:
        return zlib.crc32(np.ascontiguousarray(item).tobytes()[:65536], before)
    if isinstance(item, Mapping):
        item = list(item.items())
    if isinstance(item, (list, tuple)):
        for part in item:
            before = _digest(part, before)
        return before
    text = repr(item) if isinstance(item, (str, bytes, bool, int, float)) else type(item).__name__
    return zlib.crc32(text.encode(), before)


def _capture() -> tuple[Any, ...]:
    """Return the random states of torch, numpy and `random` as plain values, for a checkpoint."""
    state: Any = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        (state[1].tobytes(), *state[2:]),
        random.getstate(),
    )


def _restore(states: Any) -> None:
    for_torch, (words, *position), for_random = states
    torch.set_rng_state(torch.frombuffer(bytearray(for_torch), dtype=torch.uint8))
    np.random.set_state(("MT19937", np.frombuffer(words, dtype=np.uint32), *position))
    version, numbers, gauss = for_random
    random.setstate((version, tuple(numbers), gauss))
