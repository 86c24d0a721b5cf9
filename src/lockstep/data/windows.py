"""The cut: which samples an optimizer step consumes, in which micro-batches, and which of these
belong to which rank.

Everything except `Window` is a pure function of integers, so every rank, every worker and every
resumed run computes the same.

    step        consumes positions [start, stop) of its epoch's order: `global_batch` of them, fewer
                at an epoch's end
    slot        a micro-batch's number in its step, 0 .. slots - 1; positions fill the slots in
                order, so the last slots of a short step are empty
    share       a rank's contiguous range of slots. The world size and the option `balance` affect
                only the shares

A batch plan says how each epoch is cut into steps, and which samples each micro-batch has. An order
of samples is cut into micro-batches by position. If the order makes the micro-batches itself, their
numbers are cut instead: the "samples" of that plan are micro-batches, with `micro_batches` of them
in a step, and epochs may differ in length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from lockstep.config.knob import whole
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.data.orders import Batches, Order
    from lockstep.data.permutation import Indices

ENDLESS = 2**62
"""A length that is never reached: of a training without a last epoch, or of a stream."""
BY_RANKS = "cut by the number of ranks"
"""Key in a recipe: whether the micro-batches depend on the number of ranks."""
# positions in one call of an order: a permutation takes as long for one as for a hundred
_AT_ONCE = 4096


class Cut(NamedTuple):
    # a NamedTuple: one is made in every step, and a frozen dataclass takes four times as long
    """One optimizer step: positions [start, stop) of an epoch's order, cut into micro-batches."""

    step: int
    """Number of the step, counted from 0 over all epochs."""
    epoch: int
    start: int
    stop: int
    micro_batch: int
    """Samples in a full micro-batch."""
    slots: int
    """Micro-batches of a full step, even if this step is short."""
    by_rank: tuple[int, ...] = ()
    """Slots of a full step that each rank has, by rank; empty: equal shares."""
    turned: int = 0
    """If not 0, rank r has the share of rank r + `turned`, modulo the world size. A witness uses it
    to compute other ranks' shares again (checks/witness.py).
    """

    def positions(self, slot: int) -> range:
        """Return the positions of one micro-batch; empty for the last slots of a short step."""
        assert 0 <= slot < self.slots
        begin = min(self.start + slot * self.micro_batch, self.stop)
        return range(begin, min(begin + self.micro_batch, self.stop))

    def counts(self, slots: range) -> list[int]:
        """Return the number of positions of each of these micro-batches."""
        counts = []
        for slot in slots:
            begin = min(self.start + slot * self.micro_batch, self.stop)
            counts.append(min(begin + self.micro_batch, self.stop) - begin)
        return counts

    def share(self, rank: int, size: int) -> range:
        """Return the slots of one rank. With equal shares, the first `slots % size` ranks have one
        more than the others. If there are more ranks than slots, the last ranks have none.
        """
        assert 0 <= rank < size
        return _share(self.slots, self.slots, (rank + self.turned) % size, size, self.by_rank)

    def first(self, size: int) -> int:
        """Return the first rank that has slots. It has slot 0, unless shares are turned."""
        return next(rank for rank in range(size) if self.share(rank, size))

    def filled(self, rank: int, size: int) -> range:
        """Return the slots of one rank that hold samples: in a full step, its whole share."""
        full = -(-(self.stop - self.start) // self.micro_batch)
        assert 0 <= rank < size
        return _share(self.slots, full, (rank + self.turned) % size, size, self.by_rank)


@lru_cache(maxsize=1024)  # called in every step, nearly always with the same arguments
def _share(slots: int, full: int, rank: int, size: int, by_rank: tuple[int, ...]) -> range:
    """Return one rank's slots among `slots`, without those from number `full` on."""
    if by_rank:
        assert len(by_rank) == size
        assert sum(by_rank) == slots
        begin = sum(by_rank[:rank])
        count = by_rank[rank]
    else:
        least, more = divmod(slots, size)
        begin = rank * least + min(rank, more)
        count = least + (rank < more)
    return range(begin, max(begin, min(begin + count, full)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How epochs of `samples` samples are cut into steps. Raises UsageError for sizes that cannot
    be cut.
    """

    samples: int
    global_batch: int
    """Samples of an optimizer step. If it exceeds `samples`, an epoch is one short step."""
    micro_batch: int
    """Samples of a forward. If it does not divide `global_batch`, a step's last micro-batch is
    smaller.
    """
    drop_last: bool = False
    """Leave out the short last step of every epoch, on all ranks."""

    def __post_init__(self) -> None:
        if whole("samples", self.samples, 0) == 0:
            raise UsageError("empty-dataset", name="the dataset")
        whole("global_batch", self.global_batch)
        whole("micro_batch", self.micro_batch)
        if self.micro_batch > self.global_batch:
            raise UsageError(
                "micro-batch-too-large",
                micro_batch=self.micro_batch,
                global_batch=self.global_batch,
            )
        if self.drop_last and self.samples < self.global_batch:
            raise UsageError(
                "only-step-dropped",
                when="every epoch",
                have=counted(self.samples, "sample"),
                need=f"global_batch={self.global_batch}",
            )

    @property
    def slots(self) -> int:
        """Micro-batches of a full step."""
        return -(-self.global_batch // self.micro_batch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch, with a short last step unless that is dropped."""
        full, rest = divmod(self.samples, self.global_batch)
        return full + (rest > 0 and not self.drop_last)

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out."""
        return self.samples % self.global_batch if self.drop_last else 0

    def cut(self, step: int) -> Cut:
        """Return the cut of step number `step`, counted from 0 over all epochs. No step spans two
        epochs.
        """
        assert step >= 0
        epoch, index = divmod(step, self.steps_per_epoch)
        return self.at(index, epoch, step)

    def at(self, index: int, epoch: int, step: int, by_rank: tuple[int, ...] = ()) -> Cut:
        """Return the cut of step number `index` of an epoch, number `step` over all epochs."""
        start = index * self.global_batch
        stop = min(start + self.global_batch, self.samples)
        slots = -(-self.global_batch // self.micro_batch)
        return Cut(step, epoch, start, stop, self.micro_batch, slots, by_rank)

    def describe(self, size: int, owner: str = "rank", by_rank: tuple[int, ...] = ()) -> str:
        """Describe in one line how a step is cut and shared among `size` ranks (or other owners of
        shares, named by `owner`). `by_rank` gives unequal shares.
        """
        line = (
            f"global batch {self.global_batch} = {counted(self.slots, 'micro-batch', 'es')} x"
            f" {self.micro_batch}"
        )
        rest = self.global_batch % self.micro_batch
        if rest:
            line += f", the last {rest}"
        line += f"; {shares(self.slots, size, owner, by_rank)}"
        idle = self.idle(size, by_rank)
        if idle:
            line += (
                f"; the dataset's {counted(self.samples, 'sample')}"
                f" leave{'s' * (self.samples == 1)} {idle} of them without any"
            )
        if self.dropped:
            line += f"; {counted(self.dropped, 'sample')} of an epoch dropped"
        return line

    def idle(self, size: int, by_rank: tuple[int, ...] = ()) -> int:
        """Return the number of ranks that own micro-batches but never get a sample. They get none
        in the first step, and no step has more samples than the first.
        """
        first = self.at(0, 0, 0, by_rank)
        idle = 0
        for rank in range(size if by_rank else min(size, self.slots)):
            if first.share(rank, size) and not first.filled(rank, size):
                idle += 1
        return idle


def shares(slots: int, size: int, owner: str = "rank", by_rank: tuple[int, ...] = ()) -> str:
    """Describe how `slots` micro-batches are shared among `size` owners. `by_rank` gives unequal
    shares.
    """
    ranks = counted(size, owner)
    if len(set(by_rank)) > 1:
        return f"{ranks}: {', '.join(map(str, by_rank))}"
    least, more = divmod(slots, size)
    if more == 0:
        return f"{ranks} x {least}"
    if least == 0:
        return f"{ranks}: {more} x 1, {size - more} idle"
    if size <= 8:
        counts = [least + 1] * more + [least] * (size - more)
        return f"{ranks}: {', '.join(map(str, counts))}"
    return f"{ranks}: {more} x {least + 1}, {size - more} x {least}"


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Return "1 sample", "2 samples"."""
    return f"{count} {noun}{'' if count == 1 else plural}"


class ByPosition:
    """An order of samples, cut by one plan that is the same in every epoch."""

    def __init__(self, order: Order, plan: Plan) -> None:
        self.order: Order = order
        self._plan = plan

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def first(self, epoch: int) -> int:
        """Return the number of the epoch's first step, counted over all epochs."""
        return epoch * self._plan.steps_per_epoch

    def resume(self, epoch: int, first: int) -> None:
        """Take the number of the epoch's first step from a saved state. Raises UsageError if this
        plan knows another number.
        """
        _compare_first(epoch, first, self.first(epoch))

    def indices(self, epoch: int, steps: range, slots: range) -> Iterator[list[int]]:
        """Yield the sample indices of each micro-batch in these slots of these steps. Step 0 is the
        epoch's first.
        """
        import numpy as np  # not above: commands that load no data read this file

        plan = self._plan
        offsets = self._offsets(slots)
        share = offsets.size
        if not share:
            return
        at_once = -(-_AT_ONCE // share)
        for first in range(steps.start, steps.stop, at_once):
            last = min(first + at_once, steps.stop)
            begins = np.arange(first, last, dtype=np.int64) * plan.global_batch
            positions = (begins[:, None] + offsets).ravel()
            indices = self.order.at(epoch, positions[positions < plan.samples]).tolist()
            for begin in range(0, len(indices), share):  # one step each
                end = min(begin + share, len(indices))
                for start in range(begin, end, plan.micro_batch):
                    yield indices[start : min(start + plan.micro_batch, end)]

    def _offsets(self, slots: range) -> Indices:
        """Return the positions of these slots in a full step, counted from the step's first."""
        import numpy as np

        most = self._plan.global_batch
        begin = min(slots.start * self._plan.micro_batch, most)
        end = min(slots.stop * self._plan.micro_batch, most)
        return np.arange(begin, end, dtype=np.int64)

    def counts_of(self, cut: Cut) -> None:
        """Return None: each slot of the step has as many samples as positions."""
        return

    def describe(self, size: int, owner: str = "rank", by_rank: tuple[int, ...] = ()) -> str:
        return self._plan.describe(size, owner, by_rank)

    def fields(self) -> dict[str, Any]:
        """Return the sizes that must not change during a training, by name."""
        return {
            "global_batch": self._plan.global_batch,
            "micro_batch": self._plan.micro_batch,
            "drop_last": self._plan.drop_last,
        }


class ByBatch:
    """An order that makes the micro-batches itself; each step has `micro_batches` of them."""

    def __init__(self, order: Batches, micro_batches: int, *, drop_last: bool) -> None:
        self.order: Batches = order
        self._size = micro_batches
        self._drop_last = drop_last
        self._firsts = {0: 0}
        # each micro-batch is requested twice: for its samples, and for their number
        self._batch = lru_cache(maxsize=512)(self._indices_of)

    def plan(self, epoch: int) -> Plan:
        count = self.order.count(epoch)
        if self._drop_last and count < self._size:
            raise UsageError(
                "only-step-dropped",
                when=f"epoch {epoch}",
                have=counted(count, "micro-batch", "es"),
                need=f"micro_batches={self._size}",
            )
        return Plan(
            samples=count, global_batch=self._size, micro_batch=1, drop_last=self._drop_last
        )

    def first(self, epoch: int) -> int:
        known = max(number for number in self._firsts if number <= epoch)
        for number in range(known, epoch):
            self._firsts[number + 1] = self._firsts[number] + self.plan(number).steps_per_epoch
        return self._firsts[epoch]

    def resume(self, epoch: int, first: int) -> None:
        _compare_first(epoch, first, self._firsts.get(epoch, first))
        self._firsts[epoch] = first

    def indices(self, epoch: int, steps: range, slots: range) -> Iterator[list[int]]:
        plan = self.plan(epoch)
        for step in steps:
            cut = plan.at(step, epoch, step)
            for number in map(cut.positions, slots):
                if number:  # the last slots of a short step are empty
                    yield self._batch(epoch, number.start)

    def counts_of(self, cut: Cut) -> Callable[[range], list[int]]:
        """Return a function that counts the samples in each of some slots of a step, none of them
        empty.
        """

        def counts(slots: range) -> list[int]:
            return [len(self._batch(cut.epoch, cut.positions(slot).start)) for slot in slots]

        return counts

    def _indices_of(self, epoch: int, number: int) -> list[int]:
        indices: list[int] = self.order.batch(epoch, number).tolist()
        return indices

    def describe(self, size: int, owner: str = "rank", by_rank: tuple[int, ...] = ()) -> str:
        micro_batches = counted(self._size, "micro-batch", "es")
        return (
            f"{micro_batches} a step, as {type(self.order).__name__} makes them;"
            f" {shares(self._size, size, owner, by_rank)}"
        )

    def fields(self) -> dict[str, Any]:
        return {"micro_batches": self._size, "drop_last": self._drop_last}


BatchPlan = ByPosition | ByBatch
"""How epochs are cut into steps and micro-batches. All answers are the same on every rank."""


def _compare_first(epoch: int, saved: int, known: int) -> None:
    if saved != known:
        difference = f"epoch {epoch} began with step {saved} and begins with step {known}"
        raise UsageError("another-training", place="the state", differences=difference)


class Window(Sequence[Any]):
    """This rank's micro-batches of one step. It can be iterated more than once; batches are fetched
    the first time and then kept.

    `slots` are the numbers of the micro-batches that hold samples. `positions[i]` are the positions
    of `window[i]` in the epoch's order, and `counts[i]` is its number of samples. There are as many
    samples as positions, unless the order makes the micro-batches itself: each then has one
    position. `recipe` is the Loader's: the settings that must be equal on all ranks. A rank without
    a share has an empty window, and still takes part in the step. `drawn` says whether the slots
    were assigned dynamically, not by a fixed share. The argument `counts` returns the numbers of
    samples in any slots of the step. Without it there are as many as positions.
    """

    read: Callable[[Cut, range], Iterator[Any]] | None = None
    """Fetches the micro-batches of any slots of a step in this process; None: the Loader cannot."""

    def __init__(
        self,
        cut: Cut,
        rank: int,
        size: int,
        fetch: Callable[[], Any],
        counts: Callable[[range], Sequence[int]] | None = None,
        recipe: Mapping[str, Any] | None = None,
        drawn: range | None = None,
    ) -> None:
        self.cut = cut
        self.drawn = drawn is not None
        self.slots = cut.filled(rank, size) if drawn is None else drawn
        self.recipe = {} if recipe is None else recipe
        self._counts_of = counts
        self._batches: list[Any] = []
        self._fetch: Callable[[], Any] | None = fetch if self.slots else None

    @cached_property
    def positions(self) -> list[range]:
        return [self.cut.positions(slot) for slot in self.slots]

    @cached_property
    def counts(self) -> Sequence[int]:
        if self._counts_of is None:
            return self.cut.counts(self.slots)
        return self._counts_of(self.slots)

    @property
    def step(self) -> int:
        """Number of the optimizer step, counted from 0 over all epochs."""
        return self.cut.step

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.cut.epoch

    @property
    def samples(self) -> int:
        """Samples of this rank."""
        return sum(self.counts)

    def samples_by_rank(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the number of samples of each of `size` ranks, from the step's cut. `rank` is this
        rank. A window that was drawn counts 0 for all others, because it does not know their slots.
        """
        if self.drawn:
            samples = [0] * size
            samples[rank] = self.samples
            return tuple(samples)
        counts_of = self._counts_of or self.cut.counts
        return tuple(sum(counts_of(self.cut.filled(other, size))) for other in range(size))

    def turned(self, by: int, rank: int, size: int) -> Window:
        """Return a window with the share of rank `rank + by` (modulo `size`) of this step. Raises
        UsageError if only that rank can read it.
        """
        if self.read is None:
            raise UsageError("witness-cannot-read", kind=type(self).__name__)
        cut = self.cut._replace(turned=by)
        batches = self.read(cut, cut.filled(rank, size))
        return Window(cut, rank, size, partial(next, batches), self._counts_of, self.recipe)

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        index = range(len(self))[index]  # handles negative numbers, and raises IndexError
        while len(self._batches) <= index:
            self._fetch_next()
        return self._batches[index]

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.slots)):
            if len(self._batches) <= index:
                self._fetch_next()
            yield self._batches[index]

    def __repr__(self) -> str:
        return (
            f"Window(step {self.step}, epoch {self.epoch}, slots {list(self.slots)}, {self.samples}"
            " samples)"
        )

    def drain(self) -> None:
        """Fetch the remaining batches, because the next window's batches come after them."""
        while len(self._batches) < len(self.slots):
            self._fetch_next()

    def _fetch_next(self) -> None:
        assert self._fetch is not None
        self._batches.append(self._fetch())
        if len(self._batches) == len(self.slots):
            # so a window that the user keeps does not keep the loader's processes alive
            self._fetch = None
