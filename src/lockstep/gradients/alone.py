"""The reduction of a rank that steps alone: a gradient is its own sum. The buckets lie where a later meeting can sum them."""

from __future__ import annotations

from torch import Tensor

from lockstep.collectives.group import Done, Work
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import Layout
from lockstep.gradients.reductions import Reduction


class Alone:
    """`meeting` is what sums the same buckets over all ranks when they meet."""

    carries_all = True
    divisor: float | None = None

    def __init__(self, meeting: Reduction) -> None:
        self.meeting = meeting
        self.name = meeting.name

    def scatter(self) -> None:
        pass

    def memory(self, layout: Layout) -> list[Tensor]:
        return self.meeting.memory(layout)

    def start(self, bucket: Bucket) -> Work:
        return Done()
