"""How a bucket becomes the sum over all ranks.

A reduction only sums. What the sum is divided by (the weights of the step, or the world size) is its caller's affair.
"""

from __future__ import annotations

from datetime import timedelta
from statistics import median
from time import perf_counter
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lockstep.collectives.central import central_all_reduce
from lockstep.collectives.group import Group, Work
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import Layout


class Reduction(Protocol):
    """Starts the sum of one bucket over all ranks; every rank starts the same buckets in the same order."""

    name: str

    @property
    def carries_all(self) -> bool:
        """Whether what lies behind the gradients in a bucket is summed with them, on every rank."""
        ...

    def memory(self, layout: Layout) -> list[Tensor]:
        """Flat zeros for every bucket, where this reduction wants them. Every rank calls it alike."""
        ...

    def start(self, bucket: Bucket) -> Work: ...


def private(layout: Layout) -> list[Tensor]:
    """Memory of this process's own."""
    return [torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device) for plan in layout.buckets]


class Native:
    """The backend's own all-reduce of the whole bucket; it goes on while backward does."""

    name = "native"
    carries_all = True

    def __init__(self, group: Group) -> None:
        self._group = group

    def memory(self, layout: Layout) -> list[Tensor]:
        return private(layout)

    def start(self, bucket: Bucket) -> Work:
        return self._group.all_reduce(bucket.sum, place=bucket.place)


class Central:
    """Through rank 0, one gradient at a time: the naive reference that every fast reduction is tested against.

    Nothing happens before `wait`: in the middle of a backward no rank may wait for another one's program.
    """

    name = "central"
    carries_all = True

    def __init__(self, group: Group) -> None:
        self._group = group

    def memory(self, layout: Layout) -> list[Tensor]:
        return private(layout)

    def start(self, bucket: Bucket) -> Work:
        return _Later(self._group, bucket)


class _Later:
    def __init__(self, group: Group, bucket: Bucket) -> None:
        self._group, self._bucket = group, bucket

    def wait(self, timeout: timedelta | None = None) -> None:
        for span, view in zip(self._bucket.spans, self._bucket.views, strict=True):
            central_all_reduce(self._group, view, place=f"for the gradient of {span.name}")
        if self._bucket.flag is not None:
            central_all_reduce(self._group, self._bucket.flag, place="for the number of missing gradients")


class SharedMemory:
    """In memory that all ranks of one host share: gradients land there, each rank adds up its slice of everybody's, nothing else is copied.

    Nothing is added up before the end: done while backward goes on, in its hooks or on another thread, it would only take the core from it
    (docs/performance.md). By then the divisor is known, and the sum is divided while it is in the cache. With `scattered` a rank's slice
    is summed on that rank only, for an update that is sharded in the same way.
    """

    name = "shared memory"

    def __init__(self, group: Group) -> None:
        if group.memory is None:
            raise UsageError("reduce='shared_memory' needs all ranks on the CPU of one x86 Linux host, and more than one of them: use auto")
        self._memory = group.memory
        self._rank = group.rank
        self._parts: list[list[Tensor]] = []
        self.scattered = False
        self.divisor = 1.0
        """What the sums are divided by; whoever waits for them sets it before, on all ranks alike."""

    @property
    def carries_all(self) -> bool:
        return not self.scattered

    def memory(self, layout: Layout) -> list[Tensor]:
        self._parts = []
        sizes, dtypes = [plan.numel for plan in layout.buckets], [plan.dtype for plan in layout.buckets]
        self._parts = self._memory.allocate(sizes, dtypes, "for gradient buckets")
        return [parts[self._rank] for parts in self._parts]

    def start(self, bucket: Bucket) -> Work:
        parts = self._parts[bucket.index]
        return self._memory.sum_in_place(parts, bucket.place, divisor=lambda: self.divisor, scattered=self.scattered)


REDUCTIONS: dict[str, type[Native] | type[Central] | type[SharedMemory]] = {
    "native": Native,
    "central": Central,
    "shared_memory": SharedMemory,
}


_TRIALS = 5
_TRIAL_BYTES = 2**18
_quicker: WeakKeyDictionary[Group, bool] = WeakKeyDictionary()


def memory_is_quicker(group: Group) -> bool:
    """Whether an all-reduce through shared memory takes no longer than the backend's: both tried a few times, once a group, and agreed."""
    if group not in _quicker:
        assert group.memory is not None
        seconds: dict[str, list[float]] = {"native": [], "memory": []}
        for _ in range(_TRIALS):
            for name, all_reduce in (("native", group.all_reduce), ("memory", group.memory.all_reduce)):
                tensor = torch.zeros(_TRIAL_BYTES // 4)
                begin = perf_counter()
                all_reduce(tensor, place="for a trial").wait()
                seconds[name].append(perf_counter() - begin)
        medians = torch.tensor([median(values) for values in seconds.values()], dtype=torch.float64)
        group.all_reduce(medians, "max", place="for a trial").wait()
        _quicker[group] = bool(medians[1] <= medians[0])
    return _quicker[group]


def reduction(name: str, group: Group) -> Reduction:
    """The reduction of that name. "auto" is shared memory where the ranks have it, unless it is slower there, else native. Collective."""
    if name == "auto":
        name = "shared_memory" if group.memory is not None and memory_is_quicker(group) else "native"
    if name == "shared_memory" and group.size == 1:
        name = "native"
    if name not in REDUCTIONS:
        raise UsageError(f"reduce={name!r} is unknown: choose one of auto, {', '.join(REDUCTIONS)}")
    return REDUCTIONS[name](group)
