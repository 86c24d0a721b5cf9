"""Makes every sample and every batch of the user's data set under its own random stream.

Augmentation then depends only on (seed, epoch, index): not on the rank, the number of loader
workers, or what was fetched before. Batches are collated here too, because a collate function may
draw random numbers as well (masked tokens, mixed images).
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_storage
from torch.utils.data import Dataset, StackDataset, Subset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from lockstep.runtime import processes, randomness
from lockstep.runtime.failure_record import DIRECTORY
from lockstep.runtime.process_lifetime import die_with_maker, die_with_parent, heed_parent_only
from lockstep.runtime.randomness import HostState, host_generators

IDLE = -1
Made = TypeVar("Made")
Enter = Callable[[int], None]
Note = Callable[[int], None]
Keys = tuple[int, list[int]]  # an epoch, and the indices of a micro-batch's samples


class _Process(NamedTuple):
    """What makes batches in one process."""

    pid: int
    streams: Streams
    note: Note | None
    collate: Callable[[list[Any]], Any]


class KeyedDataset(Dataset[Any]):
    """Makes a whole micro-batch from the keys of its samples. The random states of the process do
    not change.

    A data set with its own `__getitems__` is called once for all samples. It cannot be seeded
    between them, so it draws from the stream of the first sample. The first micro-batches that draw
    may be fetched twice (`Streams`). `progress` is memory shared with the workers' parent: the
    index of the sample that each worker fetches.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        rank: int = 0,
        progress: Any = None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate
        self._rank = rank
        self._progress = progress
        self._at_once = fetches_at_once(dataset)
        # begins with the pid, because a forked process needs new ones
        self._process: _Process | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": None}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Keys) -> Any:
        process = self._process
        if process is None or process.pid != os.getpid():
            process = self._process = self._here()
        make = partial(self._batch, *keys, process.collate, note=process.note)
        batch = process.streams.make(make)
        if process.note is not None:
            process.note(IDLE)
        return batch

    def _here(self) -> _Process:
        """Return what this process needs: a forked one needs new ones."""
        worker = get_worker_info()
        note = None
        if worker is not None and self._progress is not None:
            note = _index_writer(self._progress, worker.id)
        collate = self._collate
        if collate is None:
            collate = default_collate if worker is None else collated
        return _Process(os.getpid(), Streams(), note, collate)

    def _batch(
        self,
        epoch: int,
        indices: list[int],
        collate: Callable[[list[Any]], Any],
        enter: Enter | None,
        note: Note | None = None,
    ) -> Any:
        fetch = self._at_one_go if self._at_once else self._one_by_one
        samples = fetch(epoch, indices, enter, note)
        if enter is not None:
            enter(randomness.collate_key(self._seed, epoch, indices[0]))
        try:
            return collate(samples)
        except Exception as error:
            self._add_note(error, epoch, indices, ", while they were made a batch")
            raise

    def _at_one_go(
        self, epoch: int, indices: list[int], enter: Enter | None, note: Note | None
    ) -> Any:
        if note is not None:
            note(indices[0])
        if enter is not None:
            enter(randomness.sample_key(self._seed, epoch, indices[0]))
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            self._add_note(error, epoch, indices)
            raise

    def _one_by_one(
        self, epoch: int, indices: list[int], enter: Enter | None, note: Note | None
    ) -> list[Any]:
        dataset = self._dataset
        samples = []
        index = indices[0]
        try:
            for index in indices:
                if note is not None:
                    note(index)
                if enter is not None:
                    enter(randomness.sample_key(self._seed, epoch, index))
                samples.append(dataset[index])
        except Exception as error:
            error.add_note(
                f"This was sample {index} of {type(dataset).__name__}, in epoch {epoch},"
                f" {fetcher_name(self._rank)}."
            )
            raise
        return samples

    def _add_note(self, error: Exception, epoch: int, indices: list[int], when: str = "") -> None:
        error.add_note(
            f"These were samples {listed(indices)} of {type(self._dataset).__name__}, in epoch"
            f" {epoch}, {fetcher_name(self._rank)}{when}."
        )


def fetcher_name(rank: int) -> str:
    """Name the process that fetches, for messages."""
    worker = get_worker_info()
    return f"on rank {rank}" if worker is None else f"in loader worker {worker.id} of rank {rank}"


def listed(indices: Sequence[int], most: int = 8) -> str:
    """List sample indices for a message, at most `most` of them."""
    shown = ", ".join(map(str, indices[:most]))
    return shown if len(indices) <= most else f"{shown} and {len(indices) - most} more"


def fetches_at_once(dataset: object) -> bool:
    """Whether the data set can fetch several samples in one call. For torch's Subset and
    StackDataset this depends on the data sets inside.
    """
    if isinstance(dataset, Subset):
        return fetches_at_once(dataset.dataset)
    if isinstance(dataset, StackDataset):
        children = dataset.datasets
        if isinstance(children, dict):
            return any(map(fetches_at_once, children.values()))
        return any(map(fetches_at_once, children))
    return callable(getattr(dataset, "__getitems__", None))


def shared_progress(workers: int) -> Any:
    """Make shared memory in which each worker notes the index of its sample; None for 0 workers."""
    return RawArray("q", [IDLE] * workers) if workers else None


def _index_writer(progress: Any, worker: int) -> Note:
    """Return a function that writes a sample's index into the worker's place."""
    # takes a third of the time of an assignment by ctypes
    return partial(memoryview(progress).cast("B").cast("q").__setitem__, worker)


def worker_setup() -> Callable[[int], None] | None:
    """Return a function for a new worker to run first: it makes the worker end with this process.

    Linux ends the worker with the *thread* that started it. A thread other than the main one may
    end before the workers should, so the result is None there. torch's workers check every few
    seconds whether their parent lives.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return partial(_bind, os.getpid())


def _bind(parent: int, worker: int) -> None:
    heed_parent_only()
    records = os.environ.get(DIRECTORY)
    if records is not None:
        rank = int(os.environ.get("RANK", "0"))
        processes.stacks_into(processes.stack_of(Path(records), rank, os.getpid()))
    if multiprocessing.get_start_method() == "forkserver":
        # The parent is the fork server. It and its children keep each other alive, so a worker also
        # watches the process that had it made.
        die_with_parent(os.getppid())
        die_with_maker()
    else:
        die_with_parent(parent)


# -- how a batch gets from a loader worker to the process that trains ------------------------------
# torch puts each tensor into shared memory and sends an open file descriptor for it. That takes both
# processes about half a millisecond a tensor, however small it is. Here small tensors are sent as
# bytes, through the pipe that would carry the descriptor.

SMALL = 2**19  # bytes; for larger tensors shared memory is as fast


class Sent:
    """A batch that is sent to another process. The class is also DataLoader's collate function:
    the batch has been collated already.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        stream = io.BytesIO()
        pickler = ForkingPickler(stream, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {**pickler.dispatch_table, torch.UntypedStorage: _reduced}
        pickler.dump(self._batch)
        return pickle.loads, (stream.getvalue(),)


def _reduced(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.device.type != "cpu" or storage.is_shared() or not 0 < len(storage) <= SMALL:
        reduced: tuple[Any, ...] = reduce_storage(storage)
        return reduced
    data: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return _storage_of, (pickle.PickleBuffer(data),)


def _storage_of(data: bytearray) -> torch.UntypedStorage:
    # The copy has torch's alignment. With another one a kernel may give other last bits.
    return torch.frombuffer(data, dtype=torch.uint8).clone().untyped_storage()


def collated(samples: list[Any]) -> Any:
    """Collate with torch's default_collate. In a loader worker, small tensors are stacked without
    shared memory, unless the user has registered another collate function for tensors.
    """
    if get_worker_info() is None or default_collate_fn_map[Tensor] is not collate_tensor_fn:
        return default_collate(samples)
    return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: _stacked})


def _stacked(tensors: Sequence[Tensor], **options: Any) -> Tensor:
    first = tensors[0]
    plain = first.layout is torch.strided and not first.is_nested
    # torch refuses to stack tensors that need a gradient, because they could not be sent
    plain = plain and not any(tensor.requires_grad for tensor in tensors)
    if plain and first.nbytes * len(tensors) <= SMALL:
        return torch.stack(tensors)  # type: ignore[arg-type]
    stacked: Tensor = collate_tensor_fn(tensors, **options)
    return stacked


# -- whether a data set draws ---------------------------------------------------------------------
# Seeding costs microseconds, and most samples draw nothing. Reading a generator's state is cheap
# (runtime/randomness.py). So no generator is seeded until its state shows that something was drawn.
# The states are then put back, and the fetch is repeated under its own stream. From then on that
# generator is always seeded. What a fetch returns does not depend on this.


class Streams:
    """Makes samples and batches, each under its own random stream. The process's random states do
    not change.
    """

    def __init__(self) -> None:
        self._generators = host_generators()
        self._seeded: list[str] = []  # the generators that samples have drawn from

    def make(self, make: Callable[[Enter | None], Made]) -> Made:
        """Return what `make(enter)` returns. `make` calls `enter(seed)` before each part with its
        own stream; `enter` is None if nothing needs a seed.

        If `make` draws from a generator that was not seeded, it is called again from the same
        states, with that generator seeded.
        """
        before = self._generators.get_state()
        seeded = list(self._seeded)
        if before.normal is not None and "numpy" not in seeded:
            seeded.append("numpy")  # a draw of the cached number would not be seen
        while True:
            enter = partial(self._generators.seed, names=tuple(seeded)) if seeded else None
            try:
                made = make(enter)
            except Exception:
                if not self._unseeded(before, self._generators.drawn(before), seeded):
                    raise
            else:
                drawn = self._generators.drawn(before)
                if not drawn or not self._unseeded(before, drawn, seeded):
                    return made
            finally:
                if seeded:
                    self._generators.set_state(before, seeded)
            seeded += [name for name in self._seeded if name not in seeded]

    def _unseeded(self, before: HostState, drawn: Sequence[str], seeded: Sequence[str]) -> bool:
        """Whether a generator was drawn from without a seed. Put the states of such ones back; they
        are seeded from now on.
        """
        unseeded = [name for name in drawn if name not in seeded]
        self._generators.set_state(before, unseeded)
        self._seeded += [name for name in unseeded if name not in self._seeded]
        return bool(unseeded)
