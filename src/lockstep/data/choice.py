"""Choose the batch plan for a Loader's arguments, and refuse combinations that make no sense."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, Sampler

from lockstep.config.knob import whole
from lockstep.data.orders import Batches, FromBatches, FromSampler, Order, Sequential, Shuffled
from lockstep.data.windows import BatchPlan, ByBatch, ByPosition, Plan
from lockstep.errors import UsageError


def choose_batch_plan(
    samples: int,
    *,
    order: Any,
    global_batch: int | None,
    batch_per_rank: int | None,
    micro_batch: int | None,
    micro_batches: int | None,
    seed: int,
    shuffle: bool | None,
    drop_last: bool,
    size: int,
) -> tuple[BatchPlan, bool]:
    """Return the batch plan for a data set of `samples` samples, and whether it depends on the
    world size. Raises UsageError for arguments that do not fit together.
    """
    if order is not None and shuffle is not None:
        raise UsageError("shuffle-and-order", shuffle=shuffle, order=type(order).__name__)
    if samples == 0:
        raise UsageError("empty-dataset", name="the dataset")
    if micro_batches is not None or isinstance(order, Batches):
        options = f"{global_batch=}", f"{batch_per_rank=}", f"{micro_batch=}"
        sizes = [option for option in options if not option.endswith("=None")]
        batches = _batches(order, micro_batches, sizes, samples, seed)
        micro_batches = whole("micro_batches", micro_batches)
        return ByBatch(batches, micro_batches, drop_last=drop_last), False
    total, micro, depends = sizes_of(global_batch, batch_per_rank, micro_batch, size)
    positions = _order(order, samples, seed, shuffle)
    plan = Plan(
        samples=positions.samples, global_batch=total, micro_batch=micro, drop_last=drop_last
    )
    return ByPosition(positions, plan), depends


def _batches(
    order: Any, micro_batches: int | None, sizes: list[str], samples: int, seed: int
) -> Batches:
    name = type(order).__name__
    if micro_batches is None:
        raise UsageError("micro-batches-not-given", order=name)
    if sizes:
        raise UsageError(
            "micro-batches-and-sizes", micro_batches=micro_batches, sizes=" and ".join(sizes)
        )
    if isinstance(order, Batches):
        return order
    if order is None or isinstance(order, Order) or not hasattr(order, "__iter__"):
        raise UsageError("order-without-micro-batches", micro_batches=micro_batches, order=name)
    return FromBatches(order, length=samples, seed=seed)


def _order(order: Any, samples: int, seed: int, shuffle: bool | None) -> Order:
    if order is None:
        return Sequential(samples) if shuffle is False else Shuffled(samples, seed)
    if isinstance(order, Order):
        return order
    name = type(order).__name__
    if isinstance(order, BatchSampler):
        raise UsageError("micro-batches-not-given", order=name)
    if not isinstance(order, Sampler) and not hasattr(order, "__iter__"):
        raise UsageError("not-an-order", order=order)
    return FromSampler(order, length=samples, seed=seed)


def sizes_of(
    global_batch: int | None, batch_per_rank: int | None, micro_batch: int | None, size: int
) -> tuple[int, int, bool]:
    """Return (global batch, micro-batch, whether either of them depends on the world size)."""
    if micro_batch is not None:
        micro_batch = whole("micro_batch", micro_batch)
    if batch_per_rank is None and global_batch is not None:
        total = whole("global_batch", global_batch)
        if micro_batch is None:
            return total, -(-total // size), True
        return total, micro_batch, False
    if batch_per_rank is None or global_batch is not None:
        raise UsageError(
            "not-one-batch-size", global_batch=global_batch, batch_per_rank=batch_per_rank
        )
    batch_per_rank = whole("batch_per_rank", batch_per_rank)
    if micro_batch is not None and batch_per_rank % micro_batch:
        raise UsageError(
            "not-a-multiple",
            name="batch_per_rank",
            value=batch_per_rank,
            micro_batch=micro_batch,
            other="global_batch",
        )
    return batch_per_rank * size, micro_batch or batch_per_rank, True
