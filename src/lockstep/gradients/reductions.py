"""How a bucket becomes the sum over all ranks.

A reduction only sums. What the sum is divided by (the weights of the step, or the world size) is its caller's affair.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from lockstep.collectives.central import central_all_reduce
from lockstep.collectives.group import Group, Work
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket


class Reduction(Protocol):
    """Starts the sum of one bucket over all ranks; every rank starts the same buckets in the same order."""

    name: str
    carries_all: bool
    """Whether what lies behind the gradients in a bucket is summed with them."""

    def start(self, bucket: Bucket) -> Work: ...


class Native:
    """The backend's own all-reduce of the whole bucket; it goes on while backward does."""

    name = "native"
    carries_all = True

    def __init__(self, group: Group) -> None:
        self._group = group

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
    """Through the memory that all ranks of one host share: no socket, no copy in the kernel.

    What there is room for is written down while backward goes on; it is added up at its end, by the ranks themselves.
    """

    name = "shared memory"
    carries_all = True

    def __init__(self, group: Group) -> None:
        if group.memory is None:
            raise UsageError("reduce='shared_memory' needs all ranks on the CPU of one x86 Linux host, and more than one of them: use auto")
        self._memory = group.memory

    def start(self, bucket: Bucket) -> Work:
        return self._memory.all_reduce(bucket.sum, place=bucket.place)


REDUCTIONS: dict[str, type[Native] | type[Central] | type[SharedMemory]] = {
    "native": Native,
    "central": Central,
    "shared_memory": SharedMemory,
}


def reduction(name: str, group: Group) -> Reduction:
    """The reduction of that name; "auto" is native, and so is shared memory with oneself."""
    if name == "auto" or (name == "shared_memory" and group.size == 1):
        name = "native"
    if name not in REDUCTIONS:
        raise UsageError(f"reduce={name!r} is unknown: choose one of auto, {', '.join(REDUCTIONS)}")
    return REDUCTIONS[name](group)
