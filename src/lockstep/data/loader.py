"""The Loader: windows of micro-batches, on torch's DataLoader, with no sample padded, repeated or dropped unasked.

Which samples a step consumes follows from the cut alone (data/windows.py); the rank only decides which of its micro-batches are fetched
here, so what a micro-batch holds, augmentation included (data/keyed.py), is the same at every world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lockstep.data.device import to_device
from lockstep.data.keyed import Key, KeyedDataset, made, worker_setup
from lockstep.data.orders import Order, Sequential, Shuffled
from lockstep.data.windows import Plan, Window, whole
from lockstep.errors import LockstepError, UsageError
from lockstep.place import rank_and_size


class Loader:
    """Loads a map-style `dataset` as windows: the micro-batches of one optimizer step that are this rank's.

    `global_batch` samples a step, cut into micro-batches of `micro_batch` samples; both belong to the training, the number of ranks
    does not. Without `micro_batch` every rank has one micro-batch a step, as with plain DDP: then what BatchNorm and dropout see depends
    on the number of ranks. `batch_per_rank` instead of `global_batch` lets the step grow with the ranks (weak scaling): another recipe at
    every world size. `depends_on_world_size` says so, and `describe()`, the line to print.

    `shuffle` draws another order every epoch from `seed`. `num_workers`, `pin_memory` (default: where the device is a GPU), `collate_fn` and
    `drop_last` (of the short last step, on all ranks) are DataLoader's; workers live as long as the Loader, and a rank that never has
    samples starts none. Batches arrive on `device`, by default this rank's. `rank` and `size` default to torch's process group's.

    torch, numpy's global generator and `random` are seeded for each sample by (seed, epoch, index), in the workers as in this process,
    whose own random states are left alone. Never pads: a ragged tail keeps its true size. Does not load iterable-style datasets.

    Raises:
        UsageError: an empty or iterable-style dataset, sizes that cannot be cut, a rank that does not exist, num_workers < 0, or
            several ranks in the environment and no process group open.
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
        global_batch, micro, self.depends_on_world_size = _sizes(global_batch, batch_per_rank, micro_batch, self.size)
        self.plan = Plan(samples=samples, global_batch=global_batch, micro_batch=micro, drop_last=drop_last)
        seed = whole("seed", seed, least=-(2**63))
        self.order: Order = Shuffled(samples, seed) if shuffle else Sequential(samples)
        self.device = torch.device(device) if device is not None else _default_device()
        workers = whole("num_workers", num_workers, least=0)
        if self.plan.cut(0).samples_of(self.rank, self.size) == 0:  # the first step is the fullest, so this rank never has samples
            workers = 0
        self._pinned = self.device.type == "cuda" if pin_memory is None else pin_memory
        self._walks = 0
        self._keys = _Keys(self)
        self._loader: DataLoader[Any] = DataLoader(
            KeyedDataset(dataset, seed, collate_fn),
            batch_sampler=self._keys,
            num_workers=workers,
            collate_fn=made,
            pin_memory=self._pinned,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # its own: starting an epoch does not touch the caller's random state
        )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.plan.steps_per_epoch

    def describe(self) -> str:
        """One line: how the global batch is cut and shared, and whether that depends on the world size."""
        line = self.plan.describe(self.size)
        return f"{line} (this recipe depends on the world size)" if self.depends_on_world_size else line

    def __iter__(self) -> Iterator[Any]:
        raise UsageError("a Loader is walked by epochs and windows: `for epoch in loader.epochs(n): for window in epoch: ...`")

    def epochs(self, count: int, start: int = 0) -> Iterator[Epoch]:
        """Epochs start, start + 1, ..., count - 1, each in its own order. One is walked at a time: beginning one ends any other."""
        numbers = range(whole("start", start, least=0), whole("count", count, least=0))
        return (Epoch(self, number) for number in numbers)

    def close(self) -> None:
        """End the workers now, not when the Loader is collected; what was not fetched is lost. A later epoch starts new ones."""
        self._walks += 1
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]  # torch has no public way


class Epoch:
    """One epoch of a Loader: iterating yields its windows in order; `len` is their number, the same on all ranks."""

    def __init__(self, loader: Loader, number: int) -> None:
        self.number = number
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.plan.steps_per_epoch

    def __repr__(self) -> str:
        return f"Epoch({self.number}, {len(self)} steps)"

    def __iter__(self) -> Iterator[Window]:
        """Yield every step's Window, empty ones too. What a loop leaves of a window is fetched before the next one."""
        loader = self._loader
        walk = _Walk(loader, self.number)
        for cut in loader.plan.cuts(self.number):
            window = Window(cut, loader.rank, loader.size, walk.fetch)
            yield window
            window.drain()


class _Walk:
    """One walk through one epoch: the source of its windows' batches, which come in order and only once.

    torch's persistent workers serve one walk at a time, and a failed fetch loses its batch. So a walk ends when a later one begins or
    when a fetch fails; from then on it raises, where it could only give the batches of other slots.
    """

    def __init__(self, loader: Loader, epoch: int) -> None:
        loader._walks += 1
        loader._keys.epoch = epoch
        self._loader, self._epoch, self._number = loader, epoch, loader._walks
        self._failed = False
        if loader._loader.num_workers:
            loader._loader.worker_init_fn = worker_setup()  # now, not in the constructor: the process may have forked since
        self._batches = iter(loader._loader)

    def fetch(self) -> Any:
        """The next batch of this rank, on its device."""
        loader = self._loader
        if self._failed or loader._walks != self._number:
            why = "a sample could not be fetched" if self._failed else "another epoch was begun or the Loader closed"
            raise LockstepError(
                f"a window of epoch {self._epoch} has batches that were not fetched before {why}: walk a window before you go on"
            )
        self._failed = True
        batch = next(self._batches)
        self._failed = False
        return to_device(batch, loader.device, non_blocking=loader._pinned)


class _Keys(Sampler[list[Key]]):
    """The batch sampler: the keys of the samples of one of this rank's micro-batches after the other, through one epoch."""

    def __init__(self, loader: Loader) -> None:
        self.epoch = 0
        self._plan, self._order, self._rank, self._size = loader.plan, loader.order, loader.rank, loader.size

    def __iter__(self) -> Iterator[list[Key]]:
        return self._of(self.epoch)

    def _of(self, epoch: int) -> Iterator[list[Key]]:
        for cut in self._plan.cuts(epoch):
            slots = [cut.positions(slot) for slot in cut.filled(self._rank, self._size)]
            if slots:
                start = slots[0].start
                keys = [(epoch, index) for index in self._order.at(epoch, np.arange(start, slots[-1].stop, dtype=np.int64)).tolist()]
                yield from (keys[positions.start - start : positions.stop - start] for positions in slots)


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    if rank is None and size is None:
        return rank_and_size()
    if rank is None or size is None:
        raise UsageError(f"rank={rank} and size={size}: give both or neither")
    rank, size = whole("rank", rank, least=0), whole("size", size)
    if rank >= size:
        raise UsageError(f"rank={rank} and size={size}: ranks go from 0 to size - 1")
    return rank, size


def _length(dataset: Any) -> int:
    map_style = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if isinstance(dataset, IterableDataset) or not map_style or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} is iterable-style: a Loader needs a map-style dataset, with __len__ and __getitem__, "
            "to say which rank gets which sample"
        )
    return len(dataset)


def _sizes(global_batch: int | None, batch_per_rank: int | None, micro_batch: int | None, size: int) -> tuple[int, int, bool]:
    """(global batch, micro-batch, whether either of them depends on the world size)."""
    if micro_batch is not None:
        micro_batch = whole("micro_batch", micro_batch)
    if batch_per_rank is None and global_batch is not None:
        total = whole("global_batch", global_batch)
        return total, -(-total // size) if micro_batch is None else micro_batch, micro_batch is None
    if batch_per_rank is None or global_batch is not None:
        raise UsageError(f"global_batch={global_batch} and batch_per_rank={batch_per_rank}: give exactly one of them")
    each = whole("batch_per_rank", batch_per_rank)
    if micro_batch is not None and each % micro_batch:
        raise UsageError(
            f"batch_per_rank={each} is not a multiple of micro_batch={micro_batch}: a rank's batch is cut into whole micro-batches; "
            "change one of them, or give global_batch"
        )
    return each * size, micro_batch or each, True


def _default_device() -> torch.device:
    ours = torch.cuda.is_available() and (not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "nccl")
    return torch.device("cuda", torch.cuda.current_device()) if ours else torch.device("cpu")
