"""Exact sums where the ranks of one host share memory: the owner of a slice finds all blocks of all ranks there, and adds them along the tree."""

from __future__ import annotations

from torch import Tensor

from lockstep.collectives.group import Group, Work
from lockstep.collectives.shared_memory.resident import Along
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.exact.reduction import ExactReduction
from lockstep.gradients.layout import Layout


class ExactInMemory(ExactReduction):
    """Stacks of blocks lie in shared memory; the sums are made, divided and handed out at the end of a step."""

    name = "shared memory, exact"

    def __init__(self, group: Group) -> None:
        if group.memory is None:
            raise UsageError("reduce='shared_memory' needs all ranks on the CPU of one x86 Linux host, and more than one of them: use auto")
        super().__init__(group)
        self._memory = group.memory
        self._parts: list[list[list[Tensor]]] = []  # by level, bucket and rank

    def memory(self, layout: Layout) -> list[Tensor]:
        self._parts, self.levels = [], ()
        sizes, dtypes = [plan.numel for plan in layout.buckets], [plan.dtype for plan in layout.buckets]
        found = self._memory.allocate(sizes * self.height, dtypes * self.height, "for gradient buckets")  # untouched pages take no room
        self._parts = [found[level * len(sizes) : (level + 1) * len(sizes)] for level in range(self.height)]
        self.levels = [[parts[self.rank] for parts in level] for level in self._parts]
        return list(self.levels[0])

    def start(self, bucket: Bucket) -> Work:
        terms = [self._parts[level][bucket.index][rank] for rank, each in enumerate(self.brought) for level in range(len(each))]
        return self._memory.sum_in_place(
            self._parts[0][bucket.index],
            bucket.place,
            divisor=lambda: self.divisor or 1.0,
            scattered=self.scattered,
            along=Along(self.term, terms),
        )
