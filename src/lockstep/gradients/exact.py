"""Exact mode: sums along one tree over the slots of a step, so that no number of ranks changes a
bit. A rank's *blocks* are the sums of its slots as far as it can add them alone
(collectives/addition_order.py).

TreeFold            a rank's own micro-batches, while they land
ExactInMemory       the blocks of all ranks of one host, in shared memory
ExactOverNetwork    the blocks of all ranks, sent to the owners of slices, which add them
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from lockstep.collectives import by_schedule
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
from lockstep.collectives.work import Handle, Later, Work
from lockstep.data.windows import BY_RANKS, Cut, Window
from lockstep.errors import LateGradient, UsageError
from lockstep.gradients.bucket import Bucket, view_of
from lockstep.gradients.fold import Fold
from lockstep.gradients.layout import Layout
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import Native, Reduction


class ExactReduction(Reduction):
    """Sums along the tree and divides. Knows the memory for blocks, and the blocks that each rank
    brings in this step.
    """

    carries_all = False  # the element behind the gradients is not summed along the tree

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.divisor = 1.0
        self.scattered = False
        self.levels: Sequence[Sequence[Tensor]] = ()
        """This rank's flat tensors, by place on its stack of blocks, then by bucket. Those of the
        lowest place become the sums.
        """
        self.height = 1
        """How many places on the stack the fullest rank needs."""
        self.mine = range(0)
        """The slots of this rank that hold samples in this step."""
        self.brought: tuple[tuple[Block, ...], ...] = ()
        """The blocks that each rank brings in this step."""
        self.term: Term = 0
        """How these blocks add up."""
        self.on_read: Callable[[Bucket, Sequence[Tensor]], None] | None = None
        """Called with a bucket and this rank's slice of all blocks, in the order of `brought`,
        before the blocks are added.
        """

    def begin(self, cut: Cut) -> bool:
        """Begin a step. Return whether `memory` must be called again, because the stacks are
        higher than before.
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
    """The reduction of ranks that share one host's memory: the owner of a slice finds all blocks
    of all ranks there, and adds them along the tree.

    Sums are computed, divided and handed out at the end of a step.
    """

    name = "shared memory, exact"

    def __init__(self, group: Group) -> None:
        self._memory = memory_of(group, "reduce")
        super().__init__(group)
        self._parts: list[list[list[Tensor]]] = []  # by level, bucket and rank

    def memory(self, layout: Layout) -> list[Tensor]:
        self._parts, self.levels = [], ()
        sizes, dtypes = layout.kinds()
        # pages that nobody touches take no memory
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

        # called when all ranks are ready, before this rank's slice is added up
        def read() -> None:
            assert self.on_read is not None
            own = slice_of(bucket.sum.numel(), self.rank, self.size)
            self.on_read(bucket, [term.data[own.start : own.stop] for term in terms])

        return self._memory.sum_in_place(
            self._parts[0][bucket.index],
            bucket.place,
            divides=self,
            before=None if self.on_read is None else read,
            scattered=self.scattered,
            along=Along(self.term, terms),
        )


class ExactOverNetwork(ExactReduction):
    """The reduction over the backend, while the backward runs. One rank only adds.

    Every rank sends its blocks of a slice to the slice's owner, which adds them and hands the slice
    out. If each rank brings one block, that sends what a ring would, 2 (W - 1) / W of the
    gradients; a rank with n > 1 micro-batches brings up to 2 log2(n) blocks. Two ranks with one
    block each use any all-reduce instead, as a + b is b + a. (Which of two nans they get may
    differ.)
    """

    name = "native, exact"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._group = group
        self._all_reduce = Native(group)

    def memory(self, layout: Layout) -> list[Tensor]:
        self.levels = ()
        self.levels = [super(ExactOverNetwork, self).memory(layout) for _ in range(self.height)]
        return list(self.levels[0])

    def start(self, bucket: Bucket) -> Work:
        flat, on_cpu = bucket.sum.data, bucket.sum.device.type == "cpu"
        slices = [slice_of(flat.numel(), rank, self.size) for rank in range(self.size)]
        own = flat[slices[self.rank].start : slices[self.rank].stop]
        # Other threads may not flush denormals as this one does, and do not know its GPU stream.
        beside = on_cpu and not _flushes_denormals()
        pair = self.size == 2 and max(map(len, self.brought)) == 1 and not self.scattered
        work: Work
        if pair and (beside or not on_cpu):
            if not self.brought[self.rank]:
                flat.fill_(ABSENT)
            work = self._all_reduce.start(bucket)
        else:
            work = self._exchanged(bucket, slices, own)
            if beside and self.size > 1:
                work = Later(self._group.in_background(work.wait))

        def divide() -> None:
            if (divisor := self.divisor or 1.0) != 1:
                (own if self.scattered else flat).div_(divisor)

        return Handle([work], divide)

    def _exchanged(self, bucket: Bucket, slices: Sequence[range], own: Tensor) -> Handle[None]:
        """Start to send all blocks to the owners of slices. Waiting for the result adds this
        rank's slice into `own`, and hands it out.
        """
        flats = [level[bucket.index].data for level in self.levels]
        brought: list[list[Tensor]] = [[] for _ in self.brought]
        works: list[Work] = []
        hand_out: Callable[[], None] | None = None
        if self.size == 1:
            brought = [flats[: len(self.brought[0])]]
        else:
            for level in range(max(map(len, self.brought))):
                works.append(self._exchange(level, flats, slices, brought, bucket.place))
            if not self.scattered:
                hand_out = self._hand_out(flats[0], slices, bucket.place)
        term = self.term

        def finish() -> None:
            pieces = [piece for each in brought for piece in each]
            if self.on_read is not None:
                self.on_read(bucket, pieces)
            add_up(term, pieces, own)
            if hand_out is not None:
                hand_out()

        return Handle(works, finish)

    def _exchange(
        self,
        level: int,
        flats: Sequence[Tensor],
        slices: Sequence[range],
        brought: Sequence[list[Tensor]],
        place: str,
    ) -> Work:
        """Start to send every rank its slice of this level's block. Append the pieces that arrive
        for this rank's slice to the lists in `brought`, by sender.
        """
        brings = [len(each) > level for each in self.brought]
        arriving = [len(slices[self.rank]) if each else 0 for each in brings]
        here = flats[0].new_empty(sum(arriving))
        leaving = [len(each) if brings[self.rank] else 0 for each in slices]
        sent = flats[level] if brings[self.rank] else flats[0][:0]
        for rank, piece in enumerate(here.split(arriving)):
            if brings[rank]:
                brought[rank].append(piece)
        return self._group.exchange(here, arriving, sent, leaving, place)

    def _hand_out(self, flat: Tensor, slices: Sequence[range], place: str) -> Callable[[], None]:
        """Return a function that fills all slices of a tensor with their owners' content."""
        if flat.device.type == "cpu":
            return by_schedule.all_gather_slices(self._group, flat, slices, place)
        mine, longest = slices[self.rank], max(map(len, slices))

        def gather() -> None:
            padded = nn.functional.pad(flat[mine.start : mine.stop], (0, longest - len(mine)))
            everybodys = self._group.all_gather(padded, place).split(longest)
            for theirs, piece in zip(slices, everybodys, strict=True):
                flat[theirs.start : theirs.stop].copy_(piece[: len(theirs)])

        return gather


class TreeFold(Fold):
    """Adds a rank's micro-batches along the tree, each bucket as soon as it is complete
    (gradients/fold.py).

    A gradient lands on a stack of blocks. If its left neighbour in the tree is this rank's, it is
    added to that at once, as autograd would do. Otherwise it waits in a place of its own. So a rank
    with n > 1 micro-batches keeps at most 2 log2(n) gradients of a parameter at a time. `.grad` is
    None until the sum over all ranks has arrived.
    """

    def __init__(self, reduction: ExactReduction) -> None:
        self.reduction = reduction
        self._turns: Sequence[Turn] = ()
        self._place = -1  # the number of the open micro-batch among this rank's
        self._landed: set[int] = set()  # the parameters whose gradients have landed in it

    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        self._buckets, self._parameters = buckets, parameters
        self._views: list[dict[int, Tensor]] = [
            {
                span.parameter: view_of(flats[bucket.index], span, parameters[span.parameter])
                for bucket in buckets
                for span in bucket.spans
            }
            for flats in self.reduction.levels
        ]
        self._folded = [0] * len(buckets)

    def begin(self, cut: Cut | None) -> bool:
        assert cut is not None, "exact mode has windows only"
        more = self.reduction.begin(cut)
        self._turns = turns(self.reduction.mine)
        self._place, self._landed = -1, set()
        self._folded = [0] * len(self._buckets)
        return more

    def begin_micro_batch(self) -> None:
        self._place += 1
        self._landed.clear()

    def add(self, number: int, scale: float) -> None:
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
        """Whether the micro-batch is this rank's first; the Reducer asks the rank of slot 0. The
        norm is summed bucket by bucket, so the buckets' order must not depend on the number of
        ranks.
        """
        return self._place == 0

    def end_micro_batch(self) -> None:
        for bucket in self._buckets:
            self._fold(bucket, self._place + 1)

    def blocks(self, bucket: Bucket) -> Iterator[tuple[int, int, Tensor]]:
        """Yield what this rank brings to the sum of a complete bucket: the first slot of a block,
        a parameter's number, and its part of the block.
        """
        brought = self.reduction.brought[self.reduction.rank]
        for block, views in zip(brought, self._views, strict=False):
            for span in bucket.spans:
                yield block.first, span.parameter, views[span.parameter]

    def fill(self, number: int, scale: float) -> None:
        """Do nothing: `complete` marks a gradient that never came as absent."""

    def complete(self, bucket: Bucket) -> None:
        self._fold(bucket, len(self._turns))

    def _fold(self, bucket: Bucket, until: int) -> None:
        """Finish this bucket's part of the micro-batches before number `until`, including those
        that this rank never ran.
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
        # `.data` hides the write from the version counters that the Reducer checks
        return self.reduction.levels[level][bucket.index].data

    def deliver(self) -> None:
        for number, parameter in enumerate(self._parameters):
            parameter.grad = self._views[0][number]

    def cleared(self, number: int, *, adding: bool) -> bool:
        return not adding and self._parameters[number].grad is not None


def exact_reducer(model: nn.Module, reduce: str, group: Group, bucket_bytes: int) -> Reducer:
    """Return a Reducer that adds along the tree. `reduce` is one that can be exact: "auto" (shared
    memory if the ranks have it), "native" or "shared_memory".
    """
    in_memory = (
        reduce != "native"
        and group.size > 1
        and (reduce == "shared_memory" or group.memory is not None)
    )
    reduction = ExactInMemory(group) if in_memory else ExactOverNetwork(group)
    return Reducer(model, group, reduction, fold=TreeFold(reduction), bucket_bytes=bucket_bytes)


def _flushes_denormals() -> bool:
    """Whether `torch.set_flush_denormal` is on in this thread. Each thread has its own setting."""
    return sys.float_info.min / 2 == 0


def check_window(window: object) -> Window:
    """Return a window of numbered micro-batches. Raises UsageError for any other object, and for a
    window that is cut by the number of ranks.
    """
    if not isinstance(window, Window):
        raise UsageError("exact-without-slots", kind=type(window).__name__)
    if window.recipe.get(BY_RANKS):
        raise UsageError("exact-cut-by-ranks")
    return window
