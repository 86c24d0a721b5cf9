"""A rank's micro-batches added up along the tree, each bucket as soon as it is complete.

A gradient lands on a stack of blocks (collectives/tree.py): one whose left neighbour is this rank's is added to it on the spot, as
autograd would; any other waits on a place of its own. So a rank keeps log2 of its micro-batches, and no more, gradients at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lockstep.collectives.tree import ABSENT, Turn, turns
from lockstep.data.windows import Cut
from lockstep.errors import LateGradient
from lockstep.gradients.bucket import Bucket, view_of
from lockstep.gradients.exact.reduction import ExactReduction


class Tree:
    """`.grad` is None until the sum over all ranks is there."""

    def __init__(self, reduction: ExactReduction) -> None:
        self._reduction = reduction
        self._turns: Sequence[Turn] = ()
        self._place = -1  # of the micro-batch that is open, among this rank's
        self._landed: set[int] = set()  # in it

    def room(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        return [parameter.numel() for parameter in parameters]

    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        self._buckets, self._parameters = buckets, parameters
        self._views: list[dict[int, Tensor]] = [
            {span.parameter: view_of(flats[bucket.index], span, parameters[span.parameter]) for bucket in buckets for span in bucket.spans}
            for flats in self._reduction.levels
        ]
        self._folded = [0] * len(buckets)

    def begin(self, cut: Cut | None) -> bool:
        assert cut is not None, "exact mode has windows only"
        more = self._reduction.begin(cut)
        self._turns = turns(self._reduction.mine)
        self._place, self._landed = -1, set()
        self._folded = [0] * len(self._buckets)
        return more

    def open(self) -> None:
        self._place += 1
        self._landed.clear()

    def land(self, number: int, scale: float) -> None:
        parameter = self._parameters[number]
        if number in self._landed:
            raise LateGradient(
                f"a second gradient of parameter {number} (shape {list(parameter.shape)}) arrived in one micro-batch, and exact mode adds up one of "
                "each. Usual cause: a block used twice under reentrant checkpointing (use_reentrant=False)"
            )
        self._landed.add(number)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        gradient = gradient * scale if scale != 1 else gradient
        turn = self._turns[self._place]
        view = self._views[turn.level][number]
        if turn.fresh:
            view.copy_(gradient)
        else:
            view.add_(gradient)

    def sets_order(self, *, closing: bool) -> bool:
        """In slot 0, whose rank the Reducer asks: the norm is summed bucket by bucket, so their order must not depend on the number of ranks."""
        return self._place == 0

    def shut(self) -> None:
        for bucket in self._buckets:
            self._fold(bucket, self._place + 1)

    def fill(self, number: int, scale: float) -> None:
        """What never came is absent, which `complete` sees to."""

    def complete(self, bucket: Bucket) -> None:
        self._fold(bucket, len(self._turns))

    def _fold(self, bucket: Bucket, until: int) -> None:
        """Finish this bucket's part of the micro-batches before number `until`, those included that were never walked."""
        for place in range(self._folded[bucket.index], until):
            turn = self._turns[place]
            if turn.fresh:
                landed = self._landed if place == self._place else ()
                for span in bucket.spans:
                    if span.parameter not in landed:
                        self._views[turn.level][span.parameter].fill_(ABSENT)
            for level in range(turn.level, turn.level - turn.carries, -1):
                self._flat(level - 1, bucket).add_(self._flat(level, bucket))
        self._folded[bucket.index] = max(until, self._folded[bucket.index])

    def _flat(self, level: int, bucket: Bucket) -> Tensor:
        return self._reduction.levels[level][bucket.index].data  # not seen by the version counters that a Reducer looks at

    def deliver(self) -> None:
        for number, parameter in enumerate(self._parameters):
            parameter.grad = self._views[0][number]

    def cleared(self, number: int, *, landing: bool) -> bool:
        return not landing and self._parameters[number].grad is not None
