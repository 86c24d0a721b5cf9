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
from itertools import chain

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
    slice_of,
    tree,
    turns,
)
from lockstep.collectives.group import Group
from lockstep.collectives.native import memory_of
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
        self.rank = group.rank
        self.size = group.size
        self.divisor = 1.0
        self.scattered = False
        self.levels: Sequence[Sequence[Tensor]] = ()
        """This rank's flat tensors, by place on its stack of blocks, then by bucket. Those of the
        lowest place become the sums.
        """
        self.height = 1
        """How many places on the stack the fullest rank needs."""
        self.own_slots = range(0)
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
        self.own_slots = shares[self.rank]
        self.brought = tuple(map(blocks, shares))
        self.term = tree(tuple(chain.from_iterable(self.brought)))
        height = max(levels(cut.share(rank, self.size)) for rank in range(self.size))
        if height <= self.height:
            return False
        self.height = height
        return True

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
        self._parts = []
        self.levels = ()
        sizes, dtypes = layout.kinds()
        # pages that nobody touches take no memory
        memory = self._memory.allocate(
            sizes * self.height, dtypes * self.height, "for gradient buckets"
        )
        levels_of_rank = []
        for first in range(0, len(memory), len(sizes)):
            level = memory[first : first + len(sizes)]
            self._parts.append(level)
            levels_of_rank.append([parts[self.rank] for parts in level])
        self.levels = levels_of_rank
        return list(levels_of_rank[0])

    def start(self, bucket: Bucket) -> Work:
        terms = []
        for rank, brought in enumerate(self.brought):
            for level in self._parts[: len(brought)]:
                terms.append(level[bucket.index][rank])

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
        flat = bucket.sum.data
        on_cpu = flat.device.type == "cpu"
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
            divisor = self.divisor or 1.0
            if divisor != 1:
                summed = own if self.scattered else flat
                summed.div_(divisor)

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
            pieces = list(chain.from_iterable(brought))
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
        purpose: str,
    ) -> Work:
        """Start to send every rank its slice of this level's block. Append the pieces that arrive
        for this rank's slice to the lists in `brought`, by sender.
        """
        length = len(slices[self.rank])
        senders = [rank for rank, own in enumerate(self.brought) if len(own) > level]
        received = flats[0].new_empty(len(senders), length)
        arriving = [0] * self.size
        for rank, piece in zip(senders, received, strict=True):
            arriving[rank] = length
            brought[rank].append(piece)
        sent, leaving = flats[0][:0], [0] * self.size
        if self.rank in senders:
            sent, leaving = flats[level], list(map(len, slices))
        return self._group.exchange(received.view(-1), arriving, sent, leaving, purpose)

    def _hand_out(self, flat: Tensor, slices: Sequence[range], purpose: str) -> Callable[[], None]:
        """Return a function that fills all slices of a tensor with their owners' content."""
        if flat.device.type == "cpu":
            return by_schedule.all_gather_slices(self._group, flat, slices, purpose)
        own = slices[self.rank]
        longest = max(map(len, slices))

        def gather() -> None:
            padded = nn.functional.pad(flat[own.start : own.stop], (0, longest - len(own)))
            pieces = self._group.all_gather(padded, purpose).split(longest)
            for piece, part in zip(pieces, slices, strict=True):
                flat[part.start : part.stop].copy_(piece[: len(part)])

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
        self._micro_batch = -1  # the number of the open micro-batch among this rank's
        self._landed: set[int] = set()  # the parameters whose gradients have landed in it

    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        self._buckets = buckets
        self._parameters = parameters
        self._views: list[dict[int, Tensor]] = []
        for flats in self.reduction.levels:
            views = {}
            for bucket, flat in zip(buckets, flats, strict=True):
                for span in bucket.spans:
                    views[span.parameter] = view_of(flat, span, parameters[span.parameter])
            self._views.append(views)
        self._folded = [0] * len(buckets)

    def begin(self, cut: Cut | None) -> bool:
        assert cut is not None, "exact mode has windows only"
        more = self.reduction.begin(cut)
        self._turns = turns(self.reduction.own_slots)
        self._micro_batch = -1
        self._landed = set()
        self._folded = [0] * len(self._buckets)
        return more

    def begin_micro_batch(self) -> None:
        self._micro_batch += 1
        self._landed.clear()

    def add(self, number: int, scale: float) -> None:
        parameter = self._parameters[number]
        if number in self._landed:
            raise LateGradient(
                "second-gradient-in-micro-batch", number=number, shape=str(list(parameter.shape))
            )
        self._landed.add(number)
        gradient = parameter.grad
        parameter.grad = None
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if scale != 1:
            gradient = gradient * scale
        turn = self._turns[self._micro_batch]
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
        return self._micro_batch == 0

    def end_micro_batch(self) -> None:
        for bucket in self._buckets:
            self._fold(bucket, self._micro_batch + 1)

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
        for number in range(self._folded[bucket.index], until):
            turn = self._turns[number]
            if turn.fresh:
                landed = self._landed if number == self._micro_batch else ()
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
