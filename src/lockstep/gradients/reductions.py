"""How a bucket becomes the sum over all ranks.

A reduction only sums. What the sum is divided by (the weights of the step, or the world size) is its caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lockstep.collectives import by_schedule
from lockstep.collectives.central import central_all_reduce
from lockstep.collectives.group import Group, Work
from lockstep.collectives.handle import Later
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.hierarchical import Hierarchical
from lockstep.gradients.layout import Layout


class Reduction(Protocol):
    """Starts the sum of one bucket over all ranks; every rank starts the same buckets in the same order."""

    name: str
    divisor: float | None
    """What the sums are divided by, on all ranks alike: whoever waits for them sets it before. None where a reduction only sums."""

    @property
    def carries_all(self) -> bool:
        """Whether what lies behind the gradients in a bucket is summed with them, on every rank."""
        ...

    def memory(self, layout: Layout) -> list[Tensor]:
        """Flat zeros for every bucket, where this reduction wants them. Every rank calls it alike."""
        ...

    def scatter(self) -> None:
        """From now on only each rank's own slice of a bucket has to be summed. It may do more."""
        ...

    def start(self, bucket: Bucket) -> Work: ...


def private(layout: Layout) -> list[Tensor]:
    """Memory of this process's own."""
    return [torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device) for plan in layout.buckets]


class Native:
    """The backend's own all-reduce of the whole bucket; it goes on while backward does."""

    name = "native"
    carries_all = True
    divisor: float | None = None

    def __init__(self, group: Group) -> None:
        self._group = group

    def scatter(self) -> None:
        pass

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
    divisor: float | None = None

    def __init__(self, group: Group) -> None:
        self._group = group

    def scatter(self) -> None:
        pass

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


class BySchedule:
    """By one of our own schedules, a message after the other: what the backend does inside, written out (collectives/algorithms/reducing.py).

    On CPUs the messages of a bucket go while backward does, on the group's thread: a round waits for another rank's, and a hook must not.
    On GPUs, whose streams belong to the thread that computes, they go in `wait`.
    """

    carries_all = True
    divisor: float | None = None

    def __init__(self, group: Group, algorithm: str) -> None:
        self._group, self._algorithm = group, algorithm
        self.name = algorithm.replace("_", "-")

    def scatter(self) -> None:
        pass

    def memory(self, layout: Layout) -> list[Tensor]:
        return private(layout)

    def start(self, bucket: Bucket) -> Work:
        flat = bucket.sum.data  # shares no version with the gradients: what arrives is no change that somebody else has made
        run = by_schedule.all_reduce(self._group, flat, "sum", self._algorithm, f" by {self.name}", place=bucket.place)
        return Later(self._group.in_background(run)) if bucket.sum.device.type == "cpu" else _InWait(run)


class _InWait:
    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def wait(self, timeout: timedelta | None = None) -> None:
        self._run()


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
        self._scattered = False
        self.divisor: float | None = 1.0

    @property
    def carries_all(self) -> bool:
        return not self._scattered

    def scatter(self) -> None:
        self._scattered = True

    def memory(self, layout: Layout) -> list[Tensor]:
        self._parts = []
        sizes, dtypes = [plan.numel for plan in layout.buckets], [plan.dtype for plan in layout.buckets]
        self._parts = self._memory.allocate(sizes, dtypes, "for gradient buckets")
        return [parts[self._rank] for parts in self._parts]

    def start(self, bucket: Bucket) -> Work:
        parts = self._parts[bucket.index]
        return self._memory.sum_in_place(parts, bucket.place, divisor=lambda: self.divisor or 1.0, scattered=self._scattered)


REDUCTIONS: dict[str, Callable[[Group], Reduction]] = {
    "native": Native,
    "central": Central,
    **{name: partial(BySchedule, algorithm=name) for name in ("ring", "tree", "halving_doubling")},
    "shared_memory": SharedMemory,
    "hierarchical": Hierarchical,
}


def reduction(name: str, group: Group) -> Reduction:
    """The reduction of that name. "auto" takes the fastest that the ranks can have, after a trial, never one slower than native. Collective."""
    if name == "auto":
        return quickest_of(group)
    if name in ("shared_memory", "hierarchical") and group.size == 1:
        name = "native"
    if name not in REDUCTIONS:
        raise UsageError(f"reduce={name!r} is unknown: choose one of auto, {', '.join(REDUCTIONS)}")
    return REDUCTIONS[name](group)


_TRIALS = 5
_TRIAL_BYTES = 2**18
_tried: WeakKeyDictionary[Group, str] = WeakKeyDictionary()


def quickest_of(group: Group) -> Reduction:
    """Shared memory on one host, hierarchical on several, unless it takes longer than the backend's own all-reduce, which is tried once a group."""
    if group.memory is not None:
        if group not in _tried:
            _tried[group] = "shared_memory" if _is_quicker(group, partial(_sum, group.memory.all_reduce)) else "native"
        return REDUCTIONS[_tried[group]](group)
    if group.size == 1 or _tried.get(group) == "native" or group.find_hosts() is None:
        return Native(group)
    found = Hierarchical(group)
    if group not in _tried:
        found.allocate([_TRIAL_BYTES // 4], [torch.float32])
        _tried[group] = "hierarchical" if _is_quicker(group, lambda: found.start_sum(0, _TRIAL).wait()) else "native"
    return found if _tried[group] == "hierarchical" else Native(group)


_TRIAL = "for a trial"


def _sum(all_reduce: Callable[..., Work]) -> None:
    all_reduce(torch.zeros(_TRIAL_BYTES // 4), place=_TRIAL).wait()


def _is_quicker(group: Group, candidate: Callable[[], object]) -> bool:
    """Whether it takes no longer than the backend's all-reduce: both tried a few times, in turns, and the result agreed.

    By the quickest run of each: what a busy machine adds to the others says nothing about the two.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    ways: tuple[Callable[[], object], ...] = (partial(_sum, group.all_reduce), candidate)
    for _ in range(_TRIALS):
        for found, run in zip(seconds, ways, strict=True):
            begin = perf_counter()
            run()
            found.append(perf_counter() - begin)
    quickest = torch.tensor([min(found) for found in seconds], dtype=torch.float64)
    group.all_reduce(quickest, "max", place=_TRIAL).wait()
    return bool(quickest[1] <= quickest[0])
