"""The cut: which samples an optimizer step consumes, in which micro-batches, and which of them are
this rank's.

Everything but `Window` is a pure function of integers, so that every rank, every worker and every
resumed run computes the same.

    step        consumes positions [start, stop) of its epoch's order: `global_batch` of them, fewer
                at an epoch's end
    slot        a micro-batch's number in its step, 0 .. slots - 1; positions fill the slots in
                order, so a short step leaves the last empty
    share       a rank's contiguous range of slots; the world size, and who is faster
                (data/balancer.py), decide nothing else
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from lockstep.config.knob import whole
from lockstep.data.balancer import in_words
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.data.balancer import Balancer, NewShares

ENDLESS = 2**62
"""As the count of `epochs`: until somebody breaks off."""
BY_RANKS = "cut by the number of ranks"
"""In a recipe: whether another number of ranks would see other micro-batches."""


class Cut(NamedTuple):
    # one is made in every step, and a frozen dataclass takes four times as long to make
    """One optimizer step: positions [start, stop) of an epoch's order, cut into micro-batches."""

    step: int
    """Number of the step, counted from 0 over all epochs."""
    epoch: int
    start: int
    stop: int
    micro_batch: int
    """Samples in a full micro-batch."""
    slots: int
    """Micro-batches of a full step, also where this step is short."""
    by_rank: tuple[int, ...] = ()
    """How many of a full step's slots each rank has, in the order of ranks; empty: evenly."""
    turned: int = 0
    """Each rank has the share of the one that is so many further on: a witness computes again
    what others do (checks/witness.py).
    """

    def positions(self, slot: int) -> range:
        """The positions of one micro-batch; empty for the slots that a short step leaves."""
        assert 0 <= slot < self.slots
        begin = min(self.start + slot * self.micro_batch, self.stop)
        return range(begin, min(begin + self.micro_batch, self.stop))

    def share(self, rank: int, size: int) -> range:
        """The slots of one rank. Evenly: the first `slots % size` ranks have one more; with more
        ranks than slots the last have none.
        """
        assert 0 <= rank < size
        return _share(self.slots, self.slots, (rank + self.turned) % size, size, self.by_rank)

    def first(self, size: int) -> int:
        """The rank that has slot 0."""
        return next(rank for rank in range(size) if self.share(rank, size))

    def filled(self, rank: int, size: int) -> range:
        """The slots of one rank that hold samples: all of its share, but in a short step."""
        full = -(-(self.stop - self.start) // self.micro_batch)
        assert 0 <= rank < size
        return _share(self.slots, full, (rank + self.turned) % size, size, self.by_rank)


@lru_cache(maxsize=1024)  # asked for in every step, and nearly always alike
def _share(slots: int, full: int, rank: int, size: int, by_rank: tuple[int, ...]) -> range:
    """One rank's slots among `slots`, less those from number `full` on."""
    if by_rank:
        assert len(by_rank) == size
        assert sum(by_rank) == slots
        begin, count = sum(by_rank[:rank]), by_rank[rank]
    else:
        each, more = divmod(slots, size)
        begin, count = rank * each + min(rank, more), each + (rank < more)
    return range(begin, max(begin, min(begin + count, full)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All steps over `samples` samples an epoch. Raises UsageError for sizes that cannot be cut."""

    samples: int
    global_batch: int
    """Samples of an optimizer step. More than there are: one short step an epoch."""
    micro_batch: int
    """Samples of a forward. Where it does not divide `global_batch`, a step's last micro-batch
    is smaller.
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
        """Optimizer steps of one epoch, a short last one included unless it is dropped."""
        full, rest = divmod(self.samples, self.global_batch)
        return full + (rest > 0 and not self.drop_last)

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out."""
        return self.samples % self.global_batch if self.drop_last else 0

    def cut(self, step: int) -> Cut:
        """Step number `step`, counted from 0 over all epochs; no step spans two epochs."""
        assert step >= 0
        epoch, place = divmod(step, self.steps_per_epoch)
        return self.at(place, epoch, step)

    def cuts(self, epoch: int, begin: int = 0, first: int | None = None) -> Iterator[Cut]:
        """The steps of one epoch from its step `begin` on, in order.

        `first` is the number of the epoch's first step, where the epochs before it had other
        lengths.
        """
        number = epoch * self.steps_per_epoch if first is None else first
        return (
            self.at(place, epoch, number + place) for place in range(begin, self.steps_per_epoch)
        )

    def at(self, place: int, epoch: int, step: int, by_rank: tuple[int, ...] = ()) -> Cut:
        """Step number `place` of an epoch, which is number `step` over all epochs."""
        start = place * self.global_batch
        stop = min(start + self.global_batch, self.samples)
        return Cut(step, epoch, start, stop, self.micro_batch, self.slots, by_rank)

    def describe(self, size: int, owner: str = "rank", by_rank: tuple[int, ...] = ()) -> str:
        """One line: how a step is cut and shared among `size` ranks, or whatever has a share;
        `by_rank` where that is not evenly.
        """
        line = (
            f"global batch {self.global_batch} = {counted(self.slots, 'micro-batch', 'es')} x"
            f" {self.micro_batch}"
        )
        if rest := self.global_batch % self.micro_batch:
            line += f", the last {rest}"
        line += f"; {shares(self.slots, size, owner, by_rank)}"
        if idle := self.idle(size, by_rank):
            line += (
                f"; the dataset's {counted(self.samples, 'sample')}"
                f" leave{'s' * (self.samples == 1)} {idle} of them without any"
            )
        if self.dropped:
            line += f"; {counted(self.dropped, 'sample')} of an epoch dropped"
        return line

    def idle(self, size: int, by_rank: tuple[int, ...] = ()) -> int:
        """Ranks that own micro-batches and yet never get a sample: the first step, the fullest,
        does not reach them.
        """
        first = self.at(0, 0, 0, by_rank)
        return sum(
            len(first.share(rank, size)) > 0 and not first.filled(rank, size)
            for rank in range(size if by_rank else min(size, self.slots))
        )


def shares(slots: int, size: int, owner: str = "rank", by_rank: tuple[int, ...] = ()) -> str:
    """How `slots` micro-batches are shared among `size` owners, in words; `by_rank` where that
    is not evenly.
    """
    ranks = counted(size, owner)
    if len(set(by_rank)) > 1:
        return f"{ranks}: {in_words(by_rank)}"
    each, more = divmod(slots, size)
    if more == 0:
        return f"{ranks} x {each}"
    if each == 0:
        return f"{ranks}: {more} x 1, {size - more} idle"
    if size <= 8:
        return f"{ranks}: {', '.join(map(str, [each + 1] * more + [each] * (size - more)))}"
    return f"{ranks}: {more} x {each + 1}, {size - more} x {each}"


def counted(count: int, noun: str, plural: str = "s") -> str:
    """ "1 sample", "2 samples"."""
    return f"{count} {noun}{'' if count == 1 else plural}"


class Window(Sequence[Any]):
    """This rank's micro-batches of one step. It can be walked more than once; batches are fetched
    on the first walk and then kept.

    `slots` are the numbers of the micro-batches that hold samples, `positions[i]` the places in the
    epoch's order of `window[i]`, and `counts[i]` how many samples it holds: as many as places, but
    where an order makes the micro-batches itself; a place is then a micro-batch's. `recipe` is what
    must be equal on all ranks for their windows to fit together, the Loader's own. A rank without a
    share has an empty window, and still takes part in the step. `drawn`: its slots are no fixed
    share, but were drawn. The argument `counts` gives the samples in the micro-batches of any slots
    of the step; None, and giving None: as many as places.
    """

    balancer: Balancer | None = None
    """Of its Loader, where shares follow measured speed: a Stepper tells it what the ranks' work
    has taken.
    """
    moved: NewShares | None = None
    """What is new from this window on, where shares have moved."""
    read: Callable[[Cut, range], Iterator[Any]] | None = None
    """Fetches the micro-batches of any slots of a step in this process; None: its Loader cannot."""

    def __init__(
        self,
        cut: Cut,
        rank: int,
        size: int,
        fetch: Callable[[], Any],
        counts: Callable[[range], Sequence[int] | None] | None = None,
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
        return self._counted(self.slots)

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
        """Samples of each of `size` ranks, by the way the step is cut. `rank` is this one; a
        window that was drawn knows of no other.
        """
        if self.drawn:
            return tuple(self.samples if each == rank else 0 for each in range(size))
        return tuple(sum(self._counted(self.cut.filled(each, size))) for each in range(size))

    def _counted(self, slots: range) -> Sequence[int]:
        """Samples in the micro-batches of these slots of the step, this rank's or not."""
        found = None if self._counts_of is None else self._counts_of(slots)
        return [len(self.cut.positions(slot)) for slot in slots] if found is None else found

    def turned(self, by: int, rank: int, size: int) -> Window:
        """The share of this step that belongs to the rank `by` further on. Raises UsageError where
        only its own rank can read it.
        """
        if self.read is None:
            raise UsageError("witness-cannot-read", kind=type(self).__name__)
        cut = self.cut._replace(turned=by)
        batches = self.read(cut, cut.filled(rank, size))
        return Window(cut, rank, size, partial(next, batches), self._counts_of, self.recipe)

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        place = range(len(self))[place]  # negative places, and IndexError
        self._have(place + 1)
        return self._batches[place]

    def __iter__(self) -> Iterator[Any]:
        for place in range(len(self.slots)):
            self._have(place + 1)
            yield self._batches[place]

    def __repr__(self) -> str:
        return (
            f"Window(step {self.step}, epoch {self.epoch}, slots {list(self.slots)}, {self.samples}"
            " samples)"
        )

    def drain(self) -> None:
        """Fetch what nobody walked: the next window's batches come after it."""
        self._have(len(self.slots))

    def _have(self, count: int) -> None:
        while len(self._batches) < count:
            assert self._fetch is not None
            self._batches.append(self._fetch())
            if len(self._batches) == len(self.slots):
                # a window that somebody keeps does not keep the loader's processes
                self._fetch = None
