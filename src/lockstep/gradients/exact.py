"""Exact mode: sums along one tree over the slots of a step (collectives/addition_order.py), so that no number
of ranks changes a bit.

TreeFold            a rank's own micro-batches, while they land
ExactInMemory       the blocks of all ranks of one host, in shared memory
ExactOverNetwork    the blocks of all ranks, sent to the owners of slices
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.collectives.addition_order import (
    ABSENT,
    Block,
    Term,
    Turn,
    add_up,
    blocks,
    levels,
    tree,
    turns,
)
from lockstep.collectives.group import Group
from lockstep.collectives.native import memory_of
from lockstep.collectives.schedule import slice_of
from lockstep.collectives.shared_memory.resident import Along
from lockstep.collectives.work import Handle, Work
from lockstep.config.knob import chosen
from lockstep.data.windows import BY_RANKS, Cut, Window
from lockstep.errors import LateGradient, UsageError
from lockstep.gradients.bucket import Bucket, view_of
from lockstep.gradients.fold import Fold
from lockstep.gradients.layout import Layout
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import REDUCTIONS, Reduction

_CARRIERS = ("auto", "native", "shared_memory")


class ExactReduction(Reduction):
    """Sums along the tree, divided: places for blocks, and what each rank brings in this step."""

    carries_all = False  # what lies behind the gradients is no part of the tree

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.divisor = 1.0
        self.scattered = False
        self.levels: Sequence[Sequence[Tensor]] = ()
        """By place on the stack of blocks, then by bucket: this rank's flat tensors. The lowest
        become the sums.
        """
        self.height = 1
        """Places on the stack that the fullest rank needs."""
        self.mine = range(0)
        """The slots of this step that are this rank's and hold samples."""
        self.brought: tuple[tuple[Block, ...], ...] = ()
        """The blocks that each rank brings in this step."""
        self.term: Term = 0
        """How they add up."""

    def begin(self, cut: Cut) -> bool:
        """A step begins. True where `memory` must be asked for again: its stacks are higher than
        those that there are.
        """
        shares = [cut.filled(rank, self.size) for rank in range(self.size)]
        self.mine = shares[self.rank]
        self.brought = tuple(blocks(share) for share in shares)
        self.term = tree(tuple(block for each in self.brought for block in each))
        height = max(levels(cut.share(rank, self.size)) for rank in range(self.size))
        higher, self.height = height > self.height, max(height, self.height)
        return higher

    def scatter(self) -> None:
        self.scattered = True


class ExactInMemory(ExactReduction):
    """Where the ranks of one host share memory: the owner of a slice finds all blocks of all ranks
    there, and adds them along the tree.

    The sums are made, divided and handed out at the end of a step.
    """

    name = "shared memory, exact"

    def __init__(self, group: Group) -> None:
        self._memory = memory_of(group, "reduce")
        super().__init__(group)
        self._parts: list[list[list[Tensor]]] = []  # by level, bucket and rank

    def memory(self, layout: Layout) -> list[Tensor]:
        self._parts, self.levels = [], ()
        sizes, dtypes = layout.kinds()
        # untouched pages take no room
        found = self._memory.allocate(
            sizes * self.height, dtypes * self.height, "for gradient buckets"
        )
        self._parts = [
            found[level * len(sizes) : (level + 1) * len(sizes)] for level in range(self.height)
        ]
        self.levels = [[parts[self.rank] for parts in level] for level in self._parts]
        return list(self.levels[0])

    def start(self, bucket: Bucket) -> Work:
        terms = [
            self._parts[level][bucket.index][rank]
            for rank, each in enumerate(self.brought)
            for level in range(len(each))
        ]
        return self._memory.sum_in_place(
            self._parts[0][bucket.index],
            bucket.place,
            divisor=lambda: self.divisor or 1.0,
            scattered=self.scattered,
            along=Along(self.term, terms),
        )


class ExactOverNetwork(ExactReduction):
    """Over the backend: all-to-all, add, all-gather; on one rank, add.

    Every rank sends the owner of a slice its blocks of it, while backward goes on; the owner adds
    them along the tree, and hands them out. With a power of two of slots and of ranks each brings
    one block, and what it sends is what a ring would, 2 (W - 1) / W of the gradients; other numbers
    bring up to log2 of a rank's micro-batches.
    """

    name = "native, exact"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._group = group

    def memory(self, layout: Layout) -> list[Tensor]:
        self.levels = ()
        self.levels = [
            [
                torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device)
                for plan in layout.buckets
            ]
            for _ in range(self.height)
        ]
        return list(self.levels[0])

    def start(self, bucket: Bucket) -> Work:
        group, term = self._group, self.term
        flats = [level[bucket.index].data for level in self.levels]
        brought: list[list[Tensor]] = [[] for _ in self.brought]
        works: list[Work] = []
        if group.size == 1:
            brought = [flats[: len(self.brought[0])]]
        else:
            for level in range(max(map(len, self.brought))):
                works.append(self._exchange(level, flats, brought, bucket.place))

        def finish() -> None:
            pieces = [piece for each in brought for piece in each]
            self._finish(pieces, term, flats[0], bucket.place)

        return Handle(works, finish)

    def _exchange(
        self, level: int, flats: Sequence[Tensor], brought: list[list[Tensor]], place: str
    ) -> Work:
        """Start to send every rank its slice of this level's block, and to add to what each has
        `brought` of this rank's slice.
        """
        group = self._group
        lengths = [len(slice_of(flats[0].numel(), rank, group.size)) for rank in range(group.size)]
        brings = [len(each) > level for each in self.brought]
        arriving = [lengths[group.rank] if each else 0 for each in brings]
        here = flats[0].new_empty(sum(arriving))
        leaving = lengths if brings[group.rank] else [0] * group.size
        sent = flats[level] if brings[group.rank] else flats[0][:0]
        for rank, piece in enumerate(here.split(arriving)):
            if brings[rank]:
                brought[rank].append(piece)
        return group.exchange(here, arriving, sent, leaving, place)

    def _finish(self, pieces: Sequence[Tensor], term: Term, flat: Tensor, place: str) -> None:
        """Add up this rank's slice, divide it, and exchange the slices."""
        group = self._group
        slices = [slice_of(flat.numel(), rank, group.size) for rank in range(group.size)]
        mine = slices[group.rank]
        out = flat[mine.start : mine.stop]
        add_up(term, pieces, out)
        if self.divisor not in (None, 1.0):
            out.div_(self.divisor)
        if group.size == 1 or self.scattered:
            return
        longest = max(map(len, slices))
        padded = flat.new_zeros(longest)
        padded[: len(mine)].copy_(out)
        everybodys = group.all_gather(padded, place).view(group.size, longest)
        for theirs, piece in zip(slices, everybodys, strict=True):
            if theirs is not mine:
                flat[theirs.start : theirs.stop].copy_(piece[: len(theirs)])


class TreeFold(Fold):
    """A rank's micro-batches added up along the tree, each bucket as soon as it is complete
    (gradients/fold.py).

    A gradient lands on a stack of blocks: one whose left neighbour is this rank's is added to it on
    the spot, as autograd would; any other waits on a place of its own. So a rank keeps log2 of its
    micro-batches, and no more, gradients at a time. `.grad` is None until the sum over all ranks is
    there.
    """

    def __init__(self, reduction: ExactReduction) -> None:
        self._reduction = reduction
        self._turns: Sequence[Turn] = ()
        self._place = -1  # of the micro-batch that is open, among this rank's
        self._landed: set[int] = set()  # in it

    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        self._buckets, self._parameters = buckets, parameters
        self._views: list[dict[int, Tensor]] = [
            {
                span.parameter: view_of(flats[bucket.index], span, parameters[span.parameter])
                for bucket in buckets
                for span in bucket.spans
            }
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
                "second-gradient-in-micro-batch", number=number, shape=str(list(parameter.shape))
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
        """In slot 0, whose rank the Reducer asks: the norm is summed bucket by bucket, so their
        order must not depend on the number of ranks.
        """
        return self._place == 0

    def shut(self) -> None:
        for bucket in self._buckets:
            self._fold(bucket, self._place + 1)

    def fill(self, number: int, scale: float) -> None:
        """What never came is absent, which `complete` sees to."""

    def complete(self, bucket: Bucket) -> None:
        self._fold(bucket, len(self._turns))

    def _fold(self, bucket: Bucket, until: int) -> None:
        """Finish this bucket's part of the micro-batches before number `until`, those included
        that were never walked.
        """
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
        # not seen by the version counters that a Reducer looks at
        return self._reduction.levels[level][bucket.index].data

    def deliver(self) -> None:
        for number, parameter in enumerate(self._parameters):
            parameter.grad = self._views[0][number]

    def cleared(self, number: int, *, landing: bool) -> bool:
        return not landing and self._parameters[number].grad is not None


def exact_reducer(model: nn.Module, reduce: str, group: Group, bucket_bytes: int) -> Reducer:
    """A Reducer that adds along the tree. "auto" goes through shared memory where the ranks have
    it. Raises UsageError.
    """
    if reduce not in _CARRIERS:
        if reduce in REDUCTIONS:
            raise UsageError("exact-with-reduce", reduce=reduce)
        chosen("reduce", reduce, _CARRIERS)
    in_memory = (
        reduce != "native"
        and group.size > 1
        and (reduce == "shared_memory" or group.memory is not None)
    )
    reduction = ExactInMemory(group) if in_memory else ExactOverNetwork(group)
    return Reducer(model, group, reduction, fold=TreeFold(reduction), bucket_bytes=bucket_bytes)


def check_window(window: object) -> Window:
    """Raise a UsageError for what is no window of numbered micro-batches, or one that is cut by
    the number of ranks.
    """
    if not isinstance(window, Window):
        raise UsageError("exact-without-slots", kind=type(window).__name__)
    if window.recipe.get(BY_RANKS):
        raise UsageError("exact-cut-by-ranks")
    return window
