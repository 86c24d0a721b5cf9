"""What every carrier of exact sums has in common: places for blocks, and what each rank brings in this step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.collectives.group import Work
from lockstep.collectives.tree import Block, Term, blocks, levels, tree
from lockstep.data.windows import Cut
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import Layout


class ExactReduction(Protocol):
    """A Reduction (gradients/reductions.py) whose sums are along the tree."""

    levels: Sequence[Sequence[Tensor]]
    """By place on the stack of blocks, then by bucket: this rank's flat tensors. The lowest become the sums."""
    name: str
    divisor: float | None

    @property
    def mine(self) -> range:
        """The slots of this step that are this rank's and hold samples."""
        ...

    @property
    def carries_all(self) -> bool: ...
    def scatter(self) -> None: ...
    def memory(self, layout: Layout) -> list[Tensor]: ...
    def start(self, bucket: Bucket) -> Work: ...

    def begin(self, cut: Cut) -> bool:
        """A step begins. True where `memory` must be asked for again: its stacks are higher than those that there are."""
        ...


class Blocks:
    """Who brings which blocks in a step, and how they add up."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.height = 1
        """Places on the stack that the fullest rank needs."""
        self.mine = range(0)
        self.by_rank: tuple[tuple[Block, ...], ...] = ()
        self.term: Term = 0

    def begin(self, cut: Cut) -> bool:
        """Follow a step's cut. True where the stacks became higher."""
        shares = [cut.filled(rank, self._size) for rank in range(self._size)]
        self.mine = shares[self._rank]
        self.by_rank = tuple(blocks(share) for share in shares)
        self.term = tree(tuple(block for brought in self.by_rank for block in brought))
        height = max(levels(cut.share(rank, self._size)) for rank in range(self._size))
        higher, self.height = height > self.height, max(height, self.height)
        return higher

    @property
    def most(self) -> int:
        """Blocks that the rank with the most brings."""
        return max(map(len, self.by_rank))


def sizes_of(layout: Layout) -> tuple[list[int], list[torch.dtype]]:
    return [plan.numel for plan in layout.buckets], [plan.dtype for plan in layout.buckets]
