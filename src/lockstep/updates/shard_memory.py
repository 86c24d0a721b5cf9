"""Where sharded parameters lie in memory, and how each rank gets what the others have updated.

SeparateMemory  every rank has its own copy, and the slices travel
SharedCopies    every rank has its own copy, in memory that the others see, and copies from theirs
OneSharedCopy   the ranks of a host have one copy: each writes its slice of it, nothing is copied
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group
from lockstep.collectives.shared_memory.one_copy import kernel_tells
from lockstep.gradients.layout import Layout

_UPDATED = "for updated parameters"


Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a flat view and the values to put there."""


Slices = Callable[[int], Sequence[range]]
"""Returns a rank's elements of each flat tensor."""


class SeparateMemory:
    """One flat tensor for each bucket of a layout: `flats`, in which the parameters lie, as this
    rank sees them, and `updated`, the same tensors as this rank writes its updated slices.
    """

    def __init__(self, layout: Layout, group: Group, slices: Slices) -> None:
        self._group = group
        self._slices = slices
        self.updated = self.flats = self._allocate(layout)

    def _allocate(self, layout: Layout) -> list[Tensor]:
        return [
            torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device) for plan in layout.buckets
        ]

    def fill(self, parameters: Copies, pieces: Copies) -> None:
        """Once: put this rank's parameters into `flats`, or its pieces of them into `updated`."""
        for view, value in parameters:
            view.copy_(value)

    def open(self) -> None:
        """Prepare for the update of slices."""

    def gather(self) -> None:
        """After the update of slices: make every rank see all ranks' slices."""
        if self._group.size == 1:
            return
        slices = [self._slices(rank) for rank in range(self._group.size)]
        works = []
        for index, flat in enumerate(self.flats):
            for rank, rank_slices in enumerate(slices):
                part = rank_slices[index]
                values = flat[part.start : part.stop]
                works.append(self._group.broadcast(values, rank, place=f"{_UPDATED} {index}"))
        for work in works:
            work.wait()

    def differing(self) -> Sequence[Tensor]:
        """The tensors that must be equal on all ranks, because the next update overwrites them."""
        return self.flats


class SharedCopies(SeparateMemory):
    def _allocate(self, layout: Layout) -> list[Tensor]:
        assert self._group.memory is not None
        self._by_rank = self._group.memory.allocate(*layout.kinds(), "for sharded parameters")
        return [flats[self._group.rank] for flats in self._by_rank]

    def gather(self) -> None:
        assert self._group.memory is not None
        self._group.memory.gather_slices(self._by_rank, place=_UPDATED)


class OneSharedCopy:
    """Shared memory is written only while every rank is between `open` and the end of `gather`: no
    rank computes with it then.

    Complete sums of gradients do not show that every rank has reached its step: a backend completes
    them by itself. So `open` synchronizes the ranks.
    """

    def __init__(self, layout: Layout, group: Group, slices: Slices) -> None:
        assert group.memory is not None
        self._memory = group.memory
        self._group = group
        self._slices = slices
        self._copy = self._memory.allocate_once(*layout.kinds(), "for the one copy of parameters")
        self.flats = self._copy.private
        self.updated = self._copy.shared

    def fill(self, parameters: Copies, pieces: Copies) -> None:
        """A rank whose replica differs from the shared values keeps it, in pages of its own."""
        for view, value in pieces:
            view.copy_(value)
        self._memory.synchronize("where parameters are shared")
        for view, value in parameters:
            if not torch.equal(view.view(torch.uint8), value.view(torch.uint8)):
                view.copy_(value)

    def open(self) -> None:
        self._memory.synchronize("before parameters are updated")
        self._copy.publish(self._slices(self._group.rank))

    def gather(self) -> None:
        self._memory.synchronize(_UPDATED)

    def differing(self) -> Sequence[Tensor]:
        return self._copy.differing()


def can_share(group: Group, layout: Layout) -> bool:
    """Whether the ranks can have one copy of such parameters. All ranks get the same answer. A
    collective.
    """
    if not _in_host_memory(group, layout):
        return False
    return all(everybodys(kernel_tells(), group.host, "for shared weights"))


def _in_host_memory(group: Group, layout: Layout) -> bool:
    """Whether the ranks share memory, and the parameters can lie in it."""
    return group.memory is not None and all(plan.device.type == "cpu" for plan in layout.buckets)


def shard_memory(
    layout: Layout, group: Group, slices: Slices, *, together: bool
) -> SeparateMemory | OneSharedCopy:
    """Return the memory that needs the least copying. `together`: this group `can_share` the
    layout.
    """
    if together:
        return OneSharedCopy(layout, group, slices)
    if _in_host_memory(group, layout):
        return SharedCopies(layout, group, slices)
    return SeparateMemory(layout, group, slices)
