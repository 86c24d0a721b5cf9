"""What can be tried for a task on this machine, the likely gains first. None of it changes the
training beyond the last bits of a sum.

`micro_batch` is not among them: it belongs to the training (micro_batch.py advises on it).
"""

from __future__ import annotations

import torch

from lockstep.config.settings import Settings
from lockstep.gradients.layout import FIRST_BUCKET, Entry, plan
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import SharedMemory
from lockstep.runtime.cores import cores
from lockstep.tools.tune.search import Tunable, Value
from lockstep.world.world import World

_BUCKETS: tuple[float, ...] = (1, 5, 100)
_LOADER_WORKERS = (1, 2)
Tried = tuple[Value, ...] | str
"""Values beside the default; or why there are none."""


def knobs(default: Settings, reducer: Reducer, world: World) -> list[Tunable]:
    """All knobs; `reducer` is that of the default settings, and torch's intra-op threads are
    its.
    """
    tried = {
        "reduce": _reduces(reducer, world),
        "update": "one rank: there is nobody to share it with" if world.size == 1 else ("sharded",),
        "threads": _threads(world) or "one core a rank",
        "loader_workers": _LOADER_WORKERS,
        "bucket_mb": _buckets(default, reducer, world),
    }
    return [
        (
            Tunable(name=name, default=getattr(default, name), reason=others)
            if isinstance(others, str)
            else Tunable(name=name, default=getattr(default, name), others=others)
        )
        for name, others in tried.items()
    ]


def _reduces(reducer: Reducer, world: World) -> Tried:
    """The other one of the two fast ones; central is the naive reference and never fast."""
    if world.size == 1:
        return "one rank: there is nothing to sum"
    if world.group.memory is None:
        return "only the backend can: shared memory takes ranks on the CPU of one host"
    return ("native" if isinstance(reducer.reduction, SharedMemory) else "shared_memory",)


def _threads(world: World) -> tuple[Value, ...]:
    """Powers of two up to a rank's share of the cores. More would take them from the other
    ranks.
    """
    share = max(1, cores() // world.local_size)
    found = {2**power for power in range(share.bit_length())} | {share}
    return tuple(sorted(found - {torch.get_num_threads()}, reverse=True))


def _buckets(default: Settings, reducer: Reducer, world: World) -> Tried:
    """Sizes that lay the gradients in another way than the default.

    With native sums a bucket leaves while the backward goes on: small ones early, large ones with
    less latency. In shared memory all are summed at the end, each between two synchronisations, so
    that the size matters little; it is tried all the same, for it costs one comparison.
    """
    if world.size == 1:
        return "one rank: nothing travels"
    seen, others = [_cuts(reducer, default.bucket_mb)], []
    for size in _BUCKETS:
        if (cuts := _cuts(reducer, size)) not in seen:
            seen.append(cuts)
            others.append(size)
    same = (
        f"other sizes put the {reducer.layout.bytes / 2**20:.1f} MiB of gradients into the same"
        " buckets"
    )
    return tuple(others) or same


def _cuts(reducer: Reducer, bucket_mb: float) -> list[int]:
    """The elements of each bucket, were they of that size."""
    entries = [
        Entry(name, parameter.numel(), parameter.dtype, parameter.device)
        for name, parameter in zip(reducer.names, reducer.parameters, strict=True)
    ]
    size = int(bucket_mb * 2**20)
    layout = plan(entries, reducer.layout.order, bucket=size, first_bucket=min(FIRST_BUCKET, size))
    return [bucket.numel for bucket in layout.buckets]
