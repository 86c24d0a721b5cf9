"""The cut: which samples an optimizer step consumes, in which micro-batches, and which of them are this rank's.

Everything here is a pure function of integers, so that every rank, every worker and every resumed run computes the same.

    step        consumes positions [start, stop) of its epoch's order: `global_batch` of them, fewer at an epoch's end
    slot        a micro-batch's number in its step, 0 .. slots - 1; positions fill the slots in order, so a short step leaves the last empty
    share       a rank's contiguous range of slots, the same in every step; the world size decides nothing else
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from lockstep.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One optimizer step: positions [start, stop) of an epoch's order, cut into micro-batches."""

    step: int
    """Number of the step, counted from 0 over all epochs."""
    epoch: int
    start: int
    stop: int
    micro_batch: int
    """Samples in a full micro-batch."""
    slots: int
    """Micro-batches of a full step."""

    def positions(self, slot: int) -> range:
        """The positions of one micro-batch; empty for the slots that a short step leaves."""
        assert 0 <= slot < self.slots
        begin = min(self.start + slot * self.micro_batch, self.stop)
        return range(begin, min(begin + self.micro_batch, self.stop))

    def share(self, rank: int, size: int) -> range:
        """The slots of one rank. The first `slots % size` ranks have one more; with more ranks than slots the last have none."""
        each, more = divmod(self.slots, size)
        begin = rank * each + min(rank, more)
        return range(begin, begin + each + (rank < more))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All steps over `samples` samples an epoch. Raises UsageError for sizes that cannot be cut."""

    samples: int
    global_batch: int
    """Samples of an optimizer step."""
    micro_batch: int
    """Samples of a forward."""
    drop_last: bool = False
    """Leave out the short last step of every epoch, on all ranks."""

    def __post_init__(self) -> None:
        for name in ("samples", "global_batch", "micro_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"{name}={value!r} is not a whole number")
        if self.samples < 1:
            raise UsageError("the dataset is empty: there is nothing to train on")
        for name in ("global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: a batch holds at least 1 sample")
        if self.micro_batch > self.global_batch:
            raise UsageError(
                f"micro_batch={self.micro_batch} is larger than global_batch={self.global_batch}: a step is cut into micro-batches, so they are no larger"
            )
        if self.drop_last and self.samples < self.global_batch:
            raise UsageError(
                f"drop_last=True drops the only step: the dataset's {self.samples} samples are fewer than global_batch={self.global_batch}"
            )

    @property
    def slots(self) -> int:
        """Micro-batches of a full step."""
        return -(-self.global_batch // self.micro_batch)

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.samples, self.global_batch)
        return full + (rest > 0 and not self.drop_last)

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out."""
        return self.samples % self.global_batch if self.drop_last else 0

    def cut(self, step: int) -> Cut:
        """Step number `step`, counted from 0 over all epochs; no step spans two epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.global_batch
        stop = min(start + self.global_batch, self.samples)
        return Cut(step=step, epoch=epoch, start=start, stop=stop, micro_batch=self.micro_batch, slots=self.slots)

    def describe(self, size: int) -> str:
        """One line: how a step is cut and shared among `size` ranks."""
        line = f"global batch {self.global_batch} = {self.slots} micro-batches x {self.micro_batch}"
        if self.global_batch % self.micro_batch:
            line += f" (the last: {self.global_batch % self.micro_batch})"
        cut = self.cut(0)
        shares = [len(cut.share(rank, size)) for rank in range(size)]
        if size == 1:
            line += "; 1 rank: all"
        elif min(shares) == max(shares):
            line += f"; {size} ranks x {shares[0]}"
        elif min(shares) == 0:
            line += f"; {size} ranks: {self.slots} x 1, {size - self.slots} idle"
        else:
            line += f"; {size} ranks: {_listed(shares)}"
        if self.dropped:
            line += f"; the last {self.dropped} samples of an epoch are dropped"
        return line


def _listed(shares: Sequence[int]) -> str:
    if len(shares) <= 8:
        return ", ".join(map(str, shares))
    more = shares.count(max(shares))
    return f"{more} x {max(shares)}, {len(shares) - more} x {min(shares)}"


class Window(Sequence[Any]):
    """This rank's micro-batches of one step. It can be walked more than once; batches are fetched on the first walk.

    `slots` are the numbers of the micro-batches that hold samples, `positions[i]` the places in the epoch's order of `window[i]`.
    A rank without a share has an empty window, and still takes part in the step.
    """

    def __init__(self, cut: Cut, rank: int, size: int, fetch: Callable[[], Any]) -> None:
        self.cut = cut
        self.slots = tuple(slot for slot in cut.share(rank, size) if len(cut.positions(slot)))
        self.positions = tuple(cut.positions(slot) for slot in self.slots)
        self._fetch = fetch
        self._batches: list[Any] = []

    @property
    def step(self) -> int:
        return self.cut.step

    @property
    def epoch(self) -> int:
        return self.cut.epoch

    @property
    def samples(self) -> int:
        """Samples of this rank."""
        return sum(map(len, self.positions))

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        place = range(len(self))[place]  # negative places, and IndexError
        while len(self._batches) <= place:
            self._batches.append(self._fetch())
        return self._batches[place]

    def __iter__(self) -> Iterator[Any]:
        for place in range(len(self)):
            yield self[place]

    def __repr__(self) -> str:
        return f"Window(step {self.step}, epoch {self.epoch}, slots {list(self.slots)}, {self.samples} samples)"

    def drain(self) -> None:
        """Fetch what nobody walked: the next window's batches come after it."""
        if len(self):
            self[len(self) - 1]
