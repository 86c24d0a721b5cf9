"""Exact sums where the ranks of one host share memory: the owner of a slice finds all blocks of all ranks there, and adds them along the tree."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.collectives.group import Group, Work
from lockstep.collectives.shared_memory.resident import Along
from lockstep.data.windows import Cut
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.exact.reduction import Blocks, sizes_of
from lockstep.gradients.layout import Layout


class ExactInMemory:
    """Stacks of blocks lie in shared memory; the sums are made, divided and handed out at the end of a step."""

    name = "shared memory, exact"

    def __init__(self, group: Group) -> None:
        if group.memory is None:
            raise UsageError("reduce='shared_memory' needs all ranks on the CPU of one x86 Linux host, and more than one of them: use auto")
        self._memory, self._rank = group.memory, group.rank
        self._blocks = Blocks(group.rank, group.size)
        self._parts: list[list[list[Tensor]]] = []  # by level, bucket and rank
        self._scattered = False
        self.divisor: float | None = 1.0
        self.levels: Sequence[Sequence[Tensor]] = ()

    carries_all = False  # what lies behind the gradients is no part of the tree

    @property
    def mine(self) -> range:
        return self._blocks.mine

    def scatter(self) -> None:
        self._scattered = True

    def memory(self, layout: Layout) -> list[Tensor]:
        self._parts, self.levels = [], ()
        sizes, dtypes = sizes_of(layout)
        height = self._blocks.height
        found = self._memory.allocate(sizes * height, dtypes * height, "for gradient buckets")  # pages that nobody touches take no room
        self._parts = [found[level * len(sizes) : (level + 1) * len(sizes)] for level in range(height)]
        self.levels = [[parts[self._rank] for parts in level] for level in self._parts]
        return list(self.levels[0])

    def begin(self, cut: Cut) -> bool:
        return self._blocks.begin(cut)

    def start(self, bucket: Bucket) -> Work:
        terms = [self._parts[level][bucket.index][rank] for rank, each in enumerate(self._blocks.by_rank) for level in range(len(each))]
        return self._memory.sum_in_place(
            self._parts[0][bucket.index],
            bucket.place,
            divisor=lambda: self.divisor or 1.0,
            scattered=self._scattered,
            along=Along(self._blocks.term, terms),
        )
