"""What every carrier of exact sums has in common: places for blocks, and what each rank brings in this step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lockstep.collectives.group import Group, Work
from lockstep.collectives.tree import Block, Term, blocks, levels, tree
from lockstep.data.windows import Cut
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import Layout


class ExactReduction(ABC):
    """A Reduction (gradients/reductions.py) whose sums are along the tree, and divided."""

    name: str
    carries_all = False  # what lies behind the gradients is no part of the tree

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.divisor: float | None = 1.0
        self.scattered = False
        self.levels: Sequence[Sequence[Tensor]] = ()
        """By place on the stack of blocks, then by bucket: this rank's flat tensors. The lowest become the sums."""
        self.height = 1
        """Places on the stack that the fullest rank needs."""
        self.mine = range(0)
        """The slots of this step that are this rank's and hold samples."""
        self.brought: tuple[tuple[Block, ...], ...] = ()
        """The blocks that each rank brings in this step."""
        self.term: Term = 0
        """How they add up."""

    def begin(self, cut: Cut) -> bool:
        """A step begins. True where `memory` must be asked for again: its stacks are higher than those that there are."""
        shares = [cut.filled(rank, self.size) for rank in range(self.size)]
        self.mine = shares[self.rank]
        self.brought = tuple(blocks(share) for share in shares)
        self.term = tree(tuple(block for each in self.brought for block in each))
        height = max(levels(cut.share(rank, self.size)) for rank in range(self.size))
        higher, self.height = height > self.height, max(height, self.height)
        return higher

    def scatter(self) -> None:
        self.scattered = True

    @abstractmethod
    def memory(self, layout: Layout) -> list[Tensor]: ...

    @abstractmethod
    def start(self, bucket: Bucket) -> Work: ...
