"""What can be tried for a task on this machine, the likely gains first. None of it changes the training beyond the last bits of a sum.

`micro_batch` is not among them: it belongs to the training (micro_batch.py advises on it).
"""

from __future__ import annotations

import torch

from lockstep.cores import cores
from lockstep.gradients.layout import FIRST_BUCKET, Entry, plan
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import SharedMemory
from lockstep.settings import Settings
from lockstep.tuning.search import Knob, Value
from lockstep.world import World

_BUCKETS: tuple[float, ...] = (1, 5, 100)
_LOADER_WORKERS = (1, 2)

OPTIONS = {
    "reduce": "--reduce",
    "update": "--update",
    "threads": "--threads",
    "loader_workers": "--loader-workers",
    "bucket_mb": "--bucket-mb",
}
"""Of `lockstep train`, by the names of the knobs."""


def knobs(default: Settings, reducer: Reducer, world: World) -> list[Knob]:
    """All knobs; `reducer` is that of the default settings, and torch's intra-op threads are its."""
    return [
        _reduce(default, reducer, world),
        _update(default, world),
        _threads(default, world),
        Knob(name="loader_workers", default=default.loader_workers, others=_LOADER_WORKERS),
        _buckets(default, reducer, world),
    ]


def _reduce(default: Settings, reducer: Reducer, world: World) -> Knob:
    """The other one of the two fast ones; central is the naive reference and never fast."""
    if world.size == 1:
        return Knob(name="reduce", default=default.reduce, reason="one rank: there is nothing to sum")
    if world.group.memory is None:
        return Knob(name="reduce", default=default.reduce, reason="only the backend can: shared memory takes ranks on the CPU of one host")
    other = "native" if isinstance(reducer.reduction, SharedMemory) else "shared_memory"
    return Knob(name="reduce", default=default.reduce, others=(other,))


def _update(default: Settings, world: World) -> Knob:
    if world.size == 1:
        return Knob(name="update", default=default.update, reason="one rank: there is nobody to share it with")
    return Knob(name="update", default=default.update, others=("sharded",))


def _threads(default: Settings, world: World) -> Knob:
    """Powers of two up to a rank's share of the cores. More would take them from the other ranks."""
    share = max(1, cores() // world.local_size)
    found = {2**power for power in range(share.bit_length())} | {share}
    others: tuple[Value, ...] = tuple(sorted((count for count in found if count != torch.get_num_threads()), reverse=True))
    return Knob(name="threads", default=default.threads, others=others, reason="" if others else "one core a rank")


def _buckets(default: Settings, reducer: Reducer, world: World) -> Knob:
    """Sizes that lay the gradients in another way than the default.

    With native sums a bucket leaves while the backward goes on: small ones early, large ones with less latency. In shared memory all are summed
    at the end, each between two synchronisations, so that the size matters little; it is tried all the same, for it costs one comparison.
    """
    if world.size == 1:
        return Knob(name="bucket_mb", default=default.bucket_mb, reason="one rank: nothing travels")
    seen, others = [_cuts(reducer, default.bucket_mb)], []
    for size in _BUCKETS:
        if (cuts := _cuts(reducer, size)) not in seen:
            seen.append(cuts)
            others.append(size)
    mib = reducer.layout.bytes / 2**20
    reason = "" if others else f"other sizes put the {mib:.1f} MiB of gradients into the same buckets"
    return Knob(name="bucket_mb", default=default.bucket_mb, others=tuple(others), reason=reason)


def _cuts(reducer: Reducer, bucket_mb: float) -> list[int]:
    """The elements of each bucket, were they of that size."""
    entries = [
        Entry(name, parameter.numel(), parameter.dtype, parameter.device)
        for name, parameter in zip(reducer.names, reducer.parameters, strict=True)
    ]
    size = int(bucket_mb * 2**20)
    layout = plan(entries, reducer.layout.order, bucket=size, first_bucket=min(FIRST_BUCKET, size))
    return [bucket.numel for bucket in layout.buckets]
