"""How a bucket becomes the sum over all ranks.

A reduction only sums. Its caller chooses what the sum is divided by: the weights of the step, or
the world size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lockstep.collectives import by_schedule
from lockstep.collectives.group import Group
from lockstep.collectives.native import memory_of
from lockstep.collectives.shared_memory.resident import Across
from lockstep.collectives.work import Done, Handle, Later, Work
from lockstep.config.knob import chosen
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import FIRST_BUCKET, Entry, Layout, plan
from lockstep.gradients.saved_state import KeepsState


class Reduction(KeepsState, ABC):
    """Starts the sum of one bucket over all ranks. Every rank starts the same buckets in the same
    order.
    """

    name: str
    carries_all = True
    """Whether the element behind the gradients in a bucket is summed with them, on every rank."""
    divisor: float | None = None
    """What the sums are divided by, equal on all ranks. Set it before somebody waits for the sums.
    None if the reduction only sums.
    """

    def memory(self, layout: Layout) -> list[Tensor]:
        """Allocate flat zeros for every bucket, in the memory that this reduction needs. Every
        rank calls it alike.
        """
        return [
            torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device) for plan in layout.buckets
        ]

    def scatter(self) -> None:
        """From now on sum at least each rank's own slice of every bucket; more is allowed."""
        return

    @abstractmethod
    def start(self, bucket: Bucket) -> Work: ...


class Alone(Reduction):
    """The reduction of a rank that steps alone: a gradient is its own sum. `over_all_ranks`
    allocates the buckets, and sums when all ranks synchronize.
    """

    def __init__(self, over_all_ranks: Reduction) -> None:
        self.over_all_ranks = over_all_ranks
        self.name = over_all_ranks.name

    def memory(self, layout: Layout) -> list[Tensor]:
        return self.over_all_ranks.memory(layout)

    def start(self, bucket: Bucket) -> Work:
        return Done()

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        return self.over_all_ranks.kept()

    def take_back(
        self, common: Mapping[str, Tensor], by_rank: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self.over_all_ranks.take_back(common, by_rank)


class Native(Reduction):
    """The backend's own all-reduce of the whole bucket. It runs during the backward."""

    name = "native"

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, bucket: Bucket) -> Work:
        return self._group.backend_all_reduce(bucket.sum, place=bucket.place)


class Central(Reduction):
    """Sums through rank 0, one gradient at a time: the naive reference that every fast reduction is
    tested against.

    Nothing happens before `wait`: during a backward no rank may wait for another rank's program.
    """

    name = "central"

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, bucket: Bucket) -> Work:
        return Handle([], lambda: self._sum(bucket))

    def _sum(self, bucket: Bucket) -> None:
        tensors = {}
        for span, view in zip(bucket.spans, bucket.views, strict=True):
            tensors[f"for the gradient of {span.name}"] = view
        if bucket.flag is not None:
            tensors["for the number of missing gradients"] = bucket.flag
        for purpose, tensor in tensors.items():
            by_schedule.all_reduce(self._group, tensor, "sum", "central", " by central", purpose)()


class BySchedule(Reduction):
    """Sums by one of our own schedules, one message after another. It shows what a backend does
    inside (schedules/algorithms/ring_tree_halving.py).

    On CPUs the messages of a bucket travel during the backward, on the group's thread: a round
    waits for another rank's, and a hook must not wait. On GPUs they travel in `wait`, because the
    streams belong to the thread that computes.
    """

    def __init__(self, group: Group, algorithm: str) -> None:
        self._group = group
        self._algorithm = algorithm
        self.name = algorithm.replace("_", "-")

    def start(self, bucket: Bucket) -> Work:
        # `.data` has its own version counter, so that arriving sums do not look like a write by
        # somebody else
        flat = bucket.sum.data
        run = by_schedule.all_reduce(
            self._group, flat, "sum", self._algorithm, f" by {self.name}", bucket.place
        )
        if flat.device.type == "cpu":
            return Later(self._group.in_background(run))
        return Handle([], run)


class SharedMemory(Reduction):
    """Sums in memory that all ranks of one host share: gradients land there, each rank adds up its
    slice of all ranks' gradients, and nothing else is copied.

    Nothing is added before the backward ends. In its hooks or on another thread, adding would only
    take the core from the backward (docs/performance.md). At the end the divisor is known, and the
    sum is divided while it is in the cache. After `scatter` a rank's slice is summed on that rank
    only, for an update that is sharded in the same way.
    """

    name = "shared memory"

    def __init__(self, group: Group) -> None:
        self._memory = memory_of(group, "reduce")
        self._rank = group.rank
        self._parts: list[list[Tensor]] = []
        self.divisor = 1.0

    def scatter(self) -> None:
        self.carries_all = False

    def memory(self, layout: Layout) -> list[Tensor]:
        self._parts = []
        self._parts = self._memory.allocate(*layout.kinds(), "for gradient buckets")
        return [parts[self._rank] for parts in self._parts]

    def start(self, bucket: Bucket) -> Work:
        parts = self._parts[bucket.index]
        return self._memory.sum_in_place(
            parts, bucket.place, divides=self, scattered=not self.carries_all
        )


class Hierarchical(Reduction):
    """Sums of ranks on several CPU hosts: first in each host's shared memory, then, slice by slice,
    by the backend's all-reduce between the hosts.

        host A   rank 0  rank 1    each rank adds up its slice of both ranks' gradients
                   |       |
        host B   rank 2  rank 3    ranks 0 and 2 all-reduce slice 0, ranks 1 and 3 slice 1;
                                   then every rank of a host has both slices

    One gradient per host travels between hosts, not one per rank. It travels during the backward,
    on a thread of its own: a slice waits for the other ranks of its host, and a hook must not wait.
    A slice of one host's sum is not a slice among all ranks, so `scatter` changes nothing.
    """

    name = "hierarchical"

    def __init__(self, group: Group) -> None:
        hosts = group.find_hosts()
        if hosts is None:
            raise UsageError("hierarchical-impossible")
        self._local = hosts.local
        self._across = hosts.across
        self._owners = hosts.owners
        self._shared: list[list[Tensor]] = []  # by bucket, then by rank of this host
        if self._local.memory is not None:
            self._local.memory.nap()

    def memory(self, layout: Layout) -> list[Tensor]:
        return self.allocate(*layout.kinds())

    def allocate(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Allocate flat zeros that `start_sum` can sum, where this host's other ranks see them."""
        self._shared = []
        if self._local.memory is None:  # one rank on this host, but several on another
            for size, dtype in zip(sizes, dtypes, strict=True):
                self._shared.append([torch.zeros(size, dtype=dtype)])
        else:
            self._shared = self._local.memory.allocate(sizes, dtypes, "for gradient buckets")
        return [tensors[self._local.rank] for tensors in self._shared]

    def start(self, bucket: Bucket) -> Work:
        return self.start_sum(bucket.index, bucket.place)

    def start_sum(self, number: int, purpose: str) -> Work:
        """Start to replace allocated tensor `number` by the sum over all ranks of all hosts."""
        tensors = self._shared[number]
        memory = self._local.memory

        def between(piece: Tensor) -> None:
            self._across.all_reduce(piece, place=purpose).wait()

        if memory is None:
            (tensor,) = tensors
            return Later(self._local.in_background(partial(between, tensor.data)))
        total = memory.sum_in_place(tensors, purpose, across=Across(self._owners, between))
        finished = Later(self._local.in_background(partial(memory.finish, total)))
        return Handle([finished], total.await_others)


REDUCTIONS: dict[str, Callable[[Group], Reduction]] = {
    "native": Native,
    "central": Central,
    **{name: partial(BySchedule, algorithm=name) for name in ("ring", "tree", "halving_doubling")},
    "shared_memory": SharedMemory,
    "hierarchical": Hierarchical,
}


def reduction(name: str, group: Group) -> Reduction:
    """Return the reduction of that name. "auto" is the fastest that these ranks can have, found by
    a trial, and never one slower than native. Collective.
    """
    if name == "auto":
        return quickest_of(group)
    if name in ("shared_memory", "hierarchical") and group.size == 1:
        name = "native"
    chosen("reduce", name, ["auto", *REDUCTIONS])
    return REDUCTIONS[name](group)


_TRIALS, _RUNS = 3, 5
_tried: WeakKeyDictionary[Group, str] = WeakKeyDictionary()


def quickest_of(group: Group) -> Reduction:
    """Return the reduction by shared memory on one host, or hierarchical on several. Return native
    if the trial, run once per group, finds it faster.
    """
    name = _tried.get(group)
    if name is None:
        if group.memory is not None:
            name = "shared_memory"
        elif group.size > 1 and group.find_hosts() is not None:
            name = "hierarchical"
        else:
            return Native(group)
        if not _is_quicker(REDUCTIONS[name](group), Native(group), group):
            name = "native"
        _tried[group] = name
    return REDUCTIONS[name](group)


def _trial_of(reduction: Reduction) -> Callable[[], object]:
    """Return a function that sums a first bucket in this reduction's memory, as training does."""
    gradient = Entry("a trial", FIRST_BUCKET // 4, torch.float32, torch.device("cpu"))
    layout = plan([gradient], [0])
    (memory,) = reduction.memory(layout)
    bucket = Bucket(layout.buckets[0], [nn.Parameter(torch.empty(gradient.numel))], memory)
    return lambda: reduction.start(bucket).wait()


def _is_quicker(candidate: Reduction, native: Native, group: Group) -> bool:
    """Whether the candidate is as fast as native in one of a few trials. Each trial runs both
    several times, in turns, and the ranks agree on the result.

    A trial compares the fastest run of each: a busy machine's delays say nothing about the two. A
    delay may add to all runs of a trial, so native has to win every trial.
    """
    runs = (_trial_of(native), _trial_of(candidate))
    for _ in range(_TRIALS):
        seconds = [math.inf, math.inf]
        for _ in range(_RUNS):
            for number, run in enumerate(runs):
                begin = perf_counter()
                run()
                seconds[number] = min(seconds[number], perf_counter() - begin)
        quickest = torch.tensor(seconds, dtype=torch.float64)
        group.all_reduce(quickest, "max", place="for a trial").wait()
        if quickest[1] <= quickest[0]:
            return True
    return False
