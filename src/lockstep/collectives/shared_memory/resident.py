"""Sums of tensors that lie in shared memory themselves: nothing is copied in, nothing is copied
out.

    region      the memory of one rank, mapped by all; a bucket of gradients lies at the same place
                in everybody's
    slice       the elements of a tensor that one rank adds up, from all regions, and writes to all
                of them

Two synchronisations: all have said that their tensor is ready, all have said that their slice is
done. Between them the tensor belongs to everybody. Which rank adds up an element decides nothing
about its bits, because all add along the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

from torch import Tensor

from lockstep.collectives.addition_order import Term, add_up, fold
from lockstep.collectives.schedule import slice_of
from lockstep.collectives.shared_memory.waits import Flag

# elements that are added up at a time, so that the sum is in the cache when it is written to the
# others
_PIECE = 2**18


class Queue(Protocol):
    """What a Sum needs of the group's shared memory (operations.py)."""

    ready: Flag
    done: Flag

    def finish_all(self) -> None: ...


class Across(NamedTuple):
    """What happens to a slice between its sum on this host and its way to everybody: it is
    summed over other hosts.
    """

    owners: int
    """The first so many ranks of this host have slices; on every host the same number."""
    reduce: Callable[[Tensor], None]
    """Replaces a slice by its sum over all hosts. Only owners call it, in the order of the sums."""


class Along(NamedTuple):
    """What is added up in place of one tensor a rank, and in which order (collectives/addition_order.py)."""

    term: Term
    tensors: Sequence[Tensor]


class Sum:
    """One tensor of each rank, in shared memory, becoming the sum of all of them: everywhere, or
    (`scattered`) each slice on its rank only.
    """

    def __init__(
        self,
        queue: Queue,
        parts: Sequence[Tensor],
        rank: int,
        order: int,
        number: int,
        divisor: Callable[[], float],
        *,
        scattered: bool,
        across: Across | None = None,
        along: Along | None = None,
    ) -> None:
        self._queue, self._parts, self._rank, self._divisor = queue, parts, rank, divisor
        self.order = order  # among the group's sums
        self._scattered = scattered
        self._across = across
        self._along = along
        self.number = number
        self.finished = False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the tensor holds the sum. Raises PeerFailed and CollectiveTimeout, naming
        who did not come.
        """
        # also what was started later: the others wait for this rank's slices of it
        self._queue.finish_all()
        self.await_others()

    def await_others(self) -> None:
        """Return when all slices are there; this rank's own is complete."""
        self._queue.done.until(self.order + 1)

    def complete(self) -> None:
        """Add up this rank's slice, as soon as all are ready."""
        self._queue.ready.until(self.order + 1)
        owners = len(self._parts) if self._across is None else self._across.owners
        if self._rank < owners:
            self._complete(slice_of(self._parts[0].numel(), self._rank, owners), self._divisor())
        self._queue.done.post(self.order + 1)
        self.finished = True

    def _complete(self, mine: range, divisor: float) -> None:
        spans = [
            slice(start, min(start + _PIECE, mine.stop))
            for start in range(mine.start, mine.stop, _PIECE)
        ]
        for span in spans:
            pieces = [part[span] for part in self._parts]
            if self._along is None:
                fold(pieces, "sum", pieces[self._rank])
            else:
                add_up(
                    self._along.term,
                    [tensor.data[span] for tensor in self._along.tensors],
                    pieces[self._rank],
                )
            if self._across is None:
                self._deliver(pieces, divisor)
        if self._across is not None:
            self._across.reduce(self._parts[self._rank][mine.start : mine.stop])
            for span in spans:
                self._deliver([part[span] for part in self._parts], divisor)

    def _deliver(self, pieces: Sequence[Tensor], divisor: float) -> None:
        own = pieces[self._rank]
        if divisor != 1:
            own.div_(divisor)
        if not self._scattered:
            for rank, piece in enumerate(pieces):
                if rank != self._rank:
                    piece.copy_(own)
