"""What a loop over a prepared loader may call: `lockstep.weigh`, `total`, `log`, `evaluating`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lockstep.data.device import to_device
from lockstep.data.loader import is_iterable
from lockstep.errors import LockstepWarning, UsageError
from lockstep.runtime import randomness
from lockstep.step.running_loops import copies_computed, current, note_copies
from lockstep.world.world import World

_COPIES = (
    "lockstep.total was called after a loop over a prepared loader, in which this rank has computed"
    " copies of micro-batches: what the body has added up counts them. Use lockstep.log(...) and"
    " loader.logged, or call lockstep.total in the body."
)
_TAKEN = {"kind", "step", "epoch", "weight", "samples_by_rank", "lr", "samples_per_s", "bytes_sent"}
"""Names that every record of a step has."""


def weigh(count: float) -> None:
    """Give the weight of the current micro-batch, in place of its number of samples: what its loss
    is a mean over, for example tokens. Call it before `backward`.

    Args:
        count: 0 or more.

    Raises:
        UsageError: outside of a loop over a prepared loader, or after the backward.
    """
    micro_batch = current()
    if micro_batch is None:
        raise UsageError("outside-prepared-loop", call="lockstep.weigh")
    if micro_batch.counted:
        raise UsageError("weigh-after-backward")
    micro_batch.weight = float(count)


def total(**sums: float | Tensor) -> dict[str, float]:
    """Return each value summed over all ranks; of integers an int. In a loop over a prepared loader
    a copy that pads a window counts nothing, but what its body has evaluated does. Every rank calls
    it with the same names.

    Args:
        sums: a number or a tensor of one element for each name.
    """
    micro_batch = current()
    counts = micro_batch is None or micro_batch.index is not None or micro_batch.evaluated
    if micro_batch is None and copies_computed():
        warnings.warn(_COPIES, LockstepWarning, stacklevel=2)
        note_copies(False)
    whole = []
    values = []
    for name, value in sums.items():
        number = value.item() if isinstance(value, Tensor) else value
        if isinstance(number, int):
            whole.append(name)
        values.append(float(number) if counts else 0.0)
    world = World.current()
    numbers = torch.tensor(values, dtype=torch.float64, device=world.device)
    world.group.all_reduce(numbers, place="in lockstep.total").wait()
    totals = dict(zip(sums, numbers.tolist(), strict=True))
    return totals | {name: int(totals[name]) for name in whole}


def log(**values: float | Tensor) -> None:
    """Record values of the current micro-batch. The metrics of the step get their mean over the
    window, weighted as the losses are. Every rank calls it with the same names.

    Args:
        values: a number or a tensor of one element for each name. `loss` replaces the step's own.

    Raises:
        UsageError: outside of a loop over a prepared loader, or a name that the metrics have.
    """
    micro_batch = current()
    if micro_batch is None:
        raise UsageError("outside-prepared-loop", call="lockstep.log")
    for name in values.keys() & _TAKEN:
        raise UsageError("metric-name-taken", name=name, names=sorted(_TAKEN))
    micro_batch.log(values)


def evaluating(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate over this rank's share of the loader's batches, moved to its device. All ranks
    together have every batch once. Ranks may have different numbers of batches: add up what
    you count, and call `lockstep.total` after the loop.

    Args:
        loader: torch's DataLoader. A shuffle is left out.
    """
    world = World.current()
    rank, size = world.rank, world.size
    micro_batch = current()
    note_copies(False)
    if micro_batch is not None:
        micro_batch.evaluated = True
    if is_iterable(loader.dataset) or loader.batch_sampler is None:
        batches: Iterator[Any] = itertools.islice(loader, rank, None, size)
    else:
        batches = iter(_own_batches(loader, rank, size))
    for batch in batches:
        yield to_device(batch, world.device)


def _own_batches(loader: DataLoader[Any], rank: int, size: int) -> DataLoader[Any]:
    """Return a DataLoader of every `size`-th batch, from number `rank` on."""
    batch_sampler: Any = loader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", None)
    if isinstance(sampler, RandomSampler):
        in_order = SequentialSampler(sampler.data_source)
        batch_sampler = BatchSampler(in_order, batch_sampler.batch_size, batch_sampler.drop_last)
    with randomness.preserved():  # the same on all ranks
        randomness.sampler(0, 0)
        every = list(batch_sampler)
    return DataLoader(
        loader.dataset,
        batch_sampler=every[rank::size],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )
