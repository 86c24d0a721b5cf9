"""Exact sums over the backend: every rank sends the owner of a slice its blocks of it, the owner adds them along the tree, and hands them out.

The blocks leave while backward goes on. With a power of two of slots and of ranks each brings one block, and what it sends is what a ring
would, 2 (W - 1) / W of the gradients; other numbers bring up to log2 of a rank's micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from lockstep.collectives.group import Group, Work, asks
from lockstep.collectives.slices import slice_of
from lockstep.collectives.tree import Term, add_up
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.exact.reduction import ExactReduction
from lockstep.gradients.layout import Layout


class ExactOverNetwork(ExactReduction):
    """All-to-all, add, all-gather; on one rank, add."""

    name = "native, exact"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._group = group

    def memory(self, layout: Layout) -> list[Tensor]:
        self.levels = ()
        self.levels = [
            [torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device) for plan in layout.buckets] for _ in range(self.height)
        ]
        return list(self.levels[0])

    def start(self, bucket: Bucket) -> Work:
        flats = [level[bucket.index].data for level in self.levels]
        if self._group.size == 1:
            return _Sum(self, bucket, flats[0], [], [flats[: len(self.brought[0])]], self.term)
        works: list[Work] = []
        most = max(map(len, self.brought))
        brought: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        lengths = [len(slice_of(flats[0].numel(), rank, self._group.size)) for rank in range(self._group.size)]
        for level in range(most):
            brings = [len(each) > level for each in self.brought]
            arriving = [lengths[self._group.rank] if each else 0 for each in brings]
            here = flats[0].new_empty(sum(arriving))
            leaving = lengths if brings[self._group.rank] else [0] * self._group.size
            sent = flats[level] if brings[self._group.rank] else flats[0][:0]
            works.append(self._group.exchange(here, arriving, sent, leaving, bucket.place))
            for rank, piece in enumerate(here.split(arriving)):
                if brings[rank]:
                    brought[rank].append(piece)
        return _Sum(self, bucket, flats[0], works, brought, self.term)

    def finish(self, pieces: Sequence[Tensor], term: Term, flat: Tensor, place: str) -> None:
        """Add up this rank's slice, divide it, and exchange the slices."""
        group = self._group
        mine = slice_of(flat.numel(), group.rank, group.size)
        out = flat[mine.start : mine.stop]
        add_up(term, pieces, out)
        if self.divisor not in (None, 1.0):
            out.div_(self.divisor)
        if group.size == 1 or self.scattered:
            return
        longest = max(len(slice_of(flat.numel(), rank, group.size)) for rank in range(group.size))
        padded = flat.new_zeros(longest)
        padded[: len(mine)].copy_(out)
        for rank, piece in enumerate(group.all_gather(padded, place).view(group.size, longest)):
            theirs = slice_of(flat.numel(), rank, group.size)
            if rank != group.rank:
                flat[theirs.start : theirs.stop].copy_(piece[: len(theirs)])


class _Sum:
    """One bucket whose blocks are on their way."""

    def __init__(
        self,
        reduction: ExactOverNetwork,
        bucket: Bucket,
        flat: Tensor,
        works: Sequence[Work],
        brought: Sequence[Sequence[Tensor]],
        term: Term,
    ) -> None:
        self._reduction, self._bucket, self._flat = reduction, bucket, flat
        self._works, self._brought, self._term = works, brought, term

    def done(self) -> bool:
        """Whether all blocks are here, without waiting; they are added up when they are waited for."""
        return all((done := asks(work)) is not None and done() for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> None:
        for work in self._works:
            work.wait(timeout)
        pieces = [piece for each in self._brought for piece in each]
        self._reduction.finish(pieces, self._term, self._flat, self._bucket.place)
