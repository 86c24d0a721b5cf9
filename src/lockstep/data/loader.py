"""The Loader: windows of micro-batches, on torch's DataLoader, with no sample padded, repeated or dropped unasked.

Which samples a step consumes follows from the cut alone (data/windows.py); the rank only decides which of its micro-batches are fetched
here. Every sample is fetched under its own random stream (seed, epoch, index), so augmentation does not depend on the rank, on the
number of loader workers, or on what was fetched before.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lockstep import randomness
from lockstep.data.orders import Order, Sequential, Shuffled
from lockstep.data.windows import Cut, Plan, Window
from lockstep.errors import UsageError
from lockstep.orphans import die_with_parent
from lockstep.place import rank_and_size

Key = tuple[int, int]  # (epoch, index of a sample)


class Loader:
    """Loads a map-style `dataset` as windows: the micro-batches of one optimizer step that are this rank's.

    `global_batch` samples a step, cut into micro-batches of `micro_batch` samples; both belong to the training, the number of ranks
    does not. Without `micro_batch` every rank has one micro-batch a step, as with plain DDP: then what BatchNorm and dropout see depends
    on the number of ranks. `batch_per_rank` instead of `global_batch` lets the step grow with the ranks (weak scaling): another recipe at
    every world size. `depends_on_world_size` says so, and `describe()`, the line to print.

    `shuffle` draws another order every epoch from `seed`. `num_workers`, `pin_memory` (default: where the device is a GPU), `collate_fn` and
    `drop_last` (of the short last step, on all ranks) are DataLoader's. Batches arrive on `device`, by default this rank's.
    `rank` and `size` default to torch's process group's. Never pads: a ragged tail keeps its true size.

    Raises UsageError for an empty or iterable-style dataset and for sizes that cannot be cut.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int | None = None,
        batch_per_rank: int | None = None,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        self.rank, self.size = _place(rank, size)
        samples = _length(dataset)
        global_batch, micro_batch, free = _sizes(global_batch, batch_per_rank, micro_batch, self.size)
        self.depends_on_world_size = not free
        self.plan = Plan(samples=samples, global_batch=global_batch, micro_batch=micro_batch, drop_last=drop_last)
        self.order: Order = Shuffled(samples, seed) if shuffle else Sequential(samples)
        self.device = torch.device(device) if device is not None else _default_device()
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise UsageError(f"num_workers={num_workers!r}: give a whole number of loader processes a rank, 0 to load in the rank itself")
        self._steps = _Steps(self.plan, self.order, self.rank, self.size)
        workers = num_workers if self._steps.has_share else 0
        self._pinned = self.device.type == "cuda" if pin_memory is None else pin_memory
        self._loader = DataLoader(
            _Keyed(dataset, seed),
            batch_sampler=self._steps,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=self._pinned,
            persistent_workers=workers > 0,
            worker_init_fn=partial(_begin_worker, os.getpid()) if workers else None,
            generator=torch.Generator(),  # its own: starting an epoch does not touch the caller's random state
        )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.plan.steps_per_epoch

    def describe(self) -> str:
        """One line: how the global batch is cut and shared, and whether that depends on the world size."""
        line = self.plan.describe(self.size)
        return f"{line} (this recipe depends on the world size)" if self.depends_on_world_size else line

    def epochs(self, count: int, start: int = 0) -> Iterator[Epoch]:
        """Epochs start, start + 1, ... before `count`, each in its own order."""
        for number in range(start, count):
            yield Epoch(self, number)

    def _fetch_from(self, batches: Iterator[Any]) -> Any:
        return to_device(next(batches), self.device, non_blocking=self._pinned)


class Epoch:
    """One epoch: iterating yields its windows."""

    def __init__(self, loader: Loader, number: int) -> None:
        self.number = number
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.plan.steps_per_epoch

    def __repr__(self) -> str:
        return f"Epoch({self.number}, {len(self)} steps)"

    def __iter__(self) -> Iterator[Window]:
        loader = self._loader
        loader._steps.epoch = self.number
        batches = iter(loader._loader)
        for cut in loader._steps.cuts():
            window = Window(cut, loader.rank, loader.size, partial(loader._fetch_from, batches))
            yield window
            window.drain()


class _Steps(Sampler[list[Key]]):
    """The batch sampler: keys of the samples of one micro-batch after the other, of one rank, for one epoch."""

    def __init__(self, plan: Plan, order: Order, rank: int, size: int) -> None:
        self.epoch = 0
        self._plan, self._order, self._rank, self._size = plan, order, rank, size

    @property
    def has_share(self) -> bool:
        return len(self._plan.cut(0).share(self._rank, self._size)) > 0

    def cuts(self) -> Iterator[Cut]:
        first = self.epoch * self._plan.steps_per_epoch
        return map(self._plan.cut, range(first, first + self._plan.steps_per_epoch))

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        for cut in self.cuts():
            for slot in cut.share(self._rank, self._size):
                positions = cut.positions(slot)
                if len(positions):
                    indices = self._order.at(epoch, np.arange(positions.start, positions.stop, dtype=np.int64))
                    yield [(epoch, index) for index in indices.tolist()]

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Keyed(Dataset[Any]):
    """The user's data set, every sample fetched under its own random stream."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        with randomness.preserved():
            return [self._one(epoch, index) for epoch, index in keys]

    def _one(self, epoch: int, index: int) -> Any:
        randomness.sample(self._seed, epoch, index)
        return self._dataset[index]


def _begin_worker(parent: int, worker: int) -> None:
    die_with_parent(parent)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The batch with every tensor in it on `device`: through dicts, lists, tuples, named tuples and dataclasses. No copy where it is there."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    move = partial(to_device, device=device, non_blocking=non_blocking)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(move, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(move, batch))
    if isinstance(batch, Mapping):
        return {name: move(value) for name, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch, **{field.name: move(getattr(batch, field.name)) for field in dataclasses.fields(batch) if field.init}
        )
    return batch


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    if rank is None and size is None:
        return rank_and_size()
    if rank is None or size is None:
        raise UsageError(f"rank={rank} and size={size}: give both or neither")
    if not 0 <= rank < size:
        raise UsageError(f"rank={rank} and size={size}: ranks go from 0 to size - 1")
    return rank, size


def _length(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} is iterable-style: a Loader needs a map-style dataset, with __len__ and __getitem__, to say which rank gets which sample"
        )
    return len(dataset)


def _sizes(global_batch: int | None, batch_per_rank: int | None, micro_batch: int | None, size: int) -> tuple[int, int, bool]:
    """(global batch, micro-batch, whether neither depends on the world size)."""
    if (global_batch is None) == (batch_per_rank is None):
        raise UsageError(f"global_batch={global_batch} and batch_per_rank={batch_per_rank}: give exactly one of them")
    if batch_per_rank is not None:
        if isinstance(batch_per_rank, bool) or not isinstance(batch_per_rank, int) or batch_per_rank < 1:
            raise UsageError(f"batch_per_rank={batch_per_rank!r}: a rank's batch is a whole number of at least 1 sample")
        return batch_per_rank * size, micro_batch or batch_per_rank, False
    assert global_batch is not None
    if micro_batch is None:
        return global_batch, max(1, -(-global_batch // size)) if isinstance(global_batch, int) else global_batch, False
    return global_batch, micro_batch, True


def _default_device() -> torch.device:
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
