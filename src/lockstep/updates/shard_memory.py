"""Where parameters that are cut into shards lie, and how each rank gets what the others have updated.

Apart       every rank has them to itself, and the slices travel
SideBySide  every rank has them to itself, in memory that the others see, and copies from theirs
Together    the ranks of a host have one copy: each writes its slice of it, nothing is copied
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group
from lockstep.collectives.shared_memory.one_copy import kernel_tells
from lockstep.gradients.layout import Layout

_UPDATED = "for updated parameters"


Copies = Sequence[tuple[Tensor, Tensor]]
"""Flat places, and what belongs there."""


class ShardMemory(Protocol):
    """One flat tensor for each bucket of a layout."""

    flats: list[Tensor]
    """In which the parameters lie, as this rank sees them."""
    updated: list[Tensor]
    """The same, where this rank updates its slices."""

    def fill(self, wholes: Copies, mine: Copies) -> None:
        """Once: put this rank's parameters into `flats`, or its pieces of them into `updated`."""
        ...

    def open(self) -> None:
        """Before slices are updated."""
        ...

    def gather(self) -> None:
        """After they were: every rank sees everybody's."""
        ...

    def differing(self) -> Sequence[Tensor]:
        """What must be equal on all ranks, because the next update overwrites it."""
        ...


Slices = Callable[[int], Sequence[range]]
"""A rank's elements of each flat tensor."""


class Apart:
    def __init__(self, layout: Layout, group: Group, slices: Slices) -> None:
        self._group, self._slices = group, slices
        self.updated = self.flats = self._allocate(layout)

    def _allocate(self, layout: Layout) -> list[Tensor]:
        return [
            torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device) for plan in layout.buckets
        ]

    def fill(self, wholes: Copies, mine: Copies) -> None:
        for place, value in wholes:
            place.copy_(value)

    def open(self) -> None:
        return

    def gather(self) -> None:
        if self._group.size == 1:
            return
        slices = [self._slices(rank) for rank in range(self._group.size)]
        works = [
            self._group.broadcast(
                flat[parts[index].start : parts[index].stop], rank, place=f"{_UPDATED} {index}"
            )
            for index, flat in enumerate(self.flats)
            for rank, parts in enumerate(slices)
        ]
        for work in works:
            work.wait()

    def differing(self) -> Sequence[Tensor]:
        return self.flats


class SideBySide(Apart):
    def _allocate(self, layout: Layout) -> list[Tensor]:
        assert self._group.memory is not None
        self._by_rank = self._group.memory.allocate(*layout.kinds(), "for sharded parameters")
        return [everyone[self._group.rank] for everyone in self._by_rank]

    def gather(self) -> None:
        assert self._group.memory is not None
        self._group.memory.gather_slices(self._by_rank, place=_UPDATED)


class Together:
    """What is shared is written while every rank is between `open` and the end of `gather`, and at
    no other time: nobody computes with it then.

    That the sums of gradients are complete does not tell that every rank has come to its step: a
    backend completes them by itself.
    """

    def __init__(self, layout: Layout, group: Group, slices: Slices) -> None:
        assert group.memory is not None
        self._memory, self._group, self._slices = group.memory, group, slices
        self._copy = self._memory.allocate_once(*layout.kinds(), "for the one copy of parameters")
        self.flats, self.updated = self._copy.private, self._copy.shared

    def fill(self, wholes: Copies, mine: Copies) -> None:
        """A rank whose replica differs from what the owners of slices share keeps it, in pages of
        its own.
        """
        for place, value in mine:
            place.copy_(value)
        self._memory.synchronize("where parameters are shared")
        for place, value in wholes:
            if not torch.equal(place.view(torch.uint8), value.view(torch.uint8)):
                place.copy_(value)

    def open(self) -> None:
        self._memory.synchronize("before parameters are updated")
        self._copy.publish(self._slices(self._group.rank))

    def gather(self) -> None:
        self._memory.synchronize(_UPDATED)

    def differing(self) -> Sequence[Tensor]:
        return self._copy.differing()


def can_share(group: Group, layout: Layout) -> bool:
    """Whether the ranks can have one copy of such parameters: the same answer on all. A
    collective.
    """
    if group.memory is None or any(plan.device.type != "cpu" for plan in layout.buckets):
        return False
    return all(everybodys(kernel_tells(), group.host, "for shared weights"))


def shard_memory(layout: Layout, group: Group, slices: Slices, *, together: bool) -> ShardMemory:
    """The least that travels. `together`: this group `can_share` the layout."""
    if together:
        return Together(layout, group, slices)
    if group.memory is not None and all(plan.device.type == "cpu" for plan in layout.buckets):
        return SideBySide(layout, group, slices)
    return Apart(layout, group, slices)
