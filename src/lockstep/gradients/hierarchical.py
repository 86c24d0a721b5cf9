"""Gradients of ranks on several CPU hosts: summed in each host's memory, then, slice by slice, between the hosts.

    host A   rank 0  rank 1        each adds up its slice of both ranks' gradients, in shared memory
               |       |
    host B   rank 2  rank 3        slice 0 goes between 0 and 2, slice 1 between 1 and 3; then everybody on a host has all of them

Between hosts goes one gradient a host and not one a rank. It goes while backward does: on a thread of its own, because a slice has to
wait for the other ranks of its host, and a hook must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

import torch
from torch import Tensor

from lockstep import status
from lockstep.collectives.group import Group, Work
from lockstep.collectives.shared_memory.resident import Across, Sum
from lockstep.errors import CollectiveTimeout, UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import Layout


class Hierarchical:
    """Shared memory inside the hosts, the backend's all-reduce between them."""

    name = "hierarchical"
    carries_all = True
    divisor: float | None = None

    def __init__(self, group: Group) -> None:
        hosts = group.find_hosts()
        if hosts is None:
            raise UsageError(
                "reduce='hierarchical' needs several x86 Linux hosts, ranks on their CPUs, and more than one of them on a host: use auto"
            )
        self._local, self._across, self._owners = hosts.local, hosts.across, hosts.owners
        self._shared: list[list[Tensor]] = []  # by bucket, then by rank of this host
        if self._local.memory is not None:
            self._local.memory.nap()

    def scatter(self) -> None:
        """A slice of one host's sum is not a slice among all ranks: every rank gets all of it."""

    def memory(self, layout: Layout) -> list[Tensor]:
        return self.allocate([plan.numel for plan in layout.buckets], [plan.dtype for plan in layout.buckets])

    def allocate(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Flat zeros that `start_sum` can sum, where the other ranks of this host see them."""
        self._shared = []
        if self._local.memory is None:  # alone here, but not on every host
            self._shared = [[torch.zeros(size, dtype=dtype)] for size, dtype in zip(sizes, dtypes, strict=True)]
        else:
            self._shared = self._local.memory.allocate(sizes, dtypes, "for gradient buckets")
        return [tensors[self._local.rank] for tensors in self._shared]

    def start(self, bucket: Bucket) -> Work:
        return self.start_sum(bucket.index, bucket.place)

    def start_sum(self, number: int, place: str) -> Work:
        """Start to replace allocated tensor `number` by the sum over all ranks of all hosts."""
        tensors, memory = self._shared[number], self._local.memory

        def between(piece: Tensor) -> None:
            self._across.all_reduce(piece, place=place).wait()

        if memory is None:
            (alone,) = tensors
            return _Crossing(self._local.in_background(lambda: between(alone.data)))
        total = memory.sum_in_place(tensors, place, across=Across(self._owners, between))
        return _Crossing(self._local.in_background(lambda: memory.finish(total)), total)


class _Crossing:
    """A sum that this host's threads are making."""

    def __init__(self, future: Future[None], total: Sum | None = None) -> None:
        self._future, self._total = future, total

    def wait(self, timeout: timedelta | None = None) -> None:
        status.waits(True)
        try:
            self._future.result(None if timeout is None else timeout.total_seconds())
        except FutureTimeout as error:
            raise CollectiveTimeout(f"the sum between hosts was not there within {timeout}", []) from error
        status.waits(False)
        if self._total is not None:
            self._total.await_others()

    def done(self) -> bool:
        """Whether this rank's part of it is, without waiting."""
        return self._future.done()
