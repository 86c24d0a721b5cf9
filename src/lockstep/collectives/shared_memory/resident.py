"""Sums of tensors that are in shared memory themselves: nothing is copied in or out.

    region      the memory of one rank, mapped by all ranks. A bucket of gradients is at the same
                offset in each region
    slice       the elements of a tensor that one rank adds, from all regions, and writes to all of
                them

There are two synchronizations: all tensors are ready, and all slices are done. Between them, all
ranks read and write the tensor. The bits of an element do not depend on which rank adds it, because
all ranks add along the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from lockstep.collectives.addition_order import Term, add_up, fold, slice_of

if TYPE_CHECKING:
    from lockstep.collectives.shared_memory.operations import HostMemory

# elements that are added at a time, so that the sum is still in the cache when it is written to the
# other ranks
_PIECE = 2**18


class Across(NamedTuple):
    """How a slice is summed over other hosts, after its sum on this host and before it goes to all
    ranks.
    """

    owners: int
    """The number of ranks of this host that have slices, from the first; equal on every host."""
    reduce: Callable[[Tensor], None]
    """Replaces a slice by its sum over all hosts. Only owners call it, in the order of the sums."""


class Along(NamedTuple):
    """Tensors to add in place of one tensor of each rank, and their order of addition
    (collectives/addition_order.py).
    """

    term: Term
    tensors: Sequence[Tensor]


class Divides(Protocol):
    """What a sum is divided by: read when the sum is complete."""

    divisor: float | None


class Sum:
    """The sum of one tensor of each rank, in shared memory. It replaces all of these tensors or, if
    `scattered`, each slice on its rank only.
    """

    def __init__(
        self,
        memory: HostMemory,
        parts: Sequence[Tensor],
        rank: int,
        order: int,
        number: int,
        divides: Divides | None,
        before: Callable[[], None] | None,
        *,
        scattered: bool,
        across: Across | None = None,
        along: Along | None = None,
    ) -> None:
        self._memory = memory
        self._parts = parts
        self._rank = rank
        self._divides = divides
        self._before = before
        self.order = order  # number among the group's sums
        self._scattered = scattered
        self._across = across
        self._along = along
        self.number = number
        self.finished = False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the tensor holds the sum. Raises PeerFailed, and CollectiveTimeout with the
        ranks that did not come.
        """
        # also what was started later: the other ranks wait for this rank's slices of it
        self._memory.finish_all()
        self.await_others()

    def await_others(self) -> None:
        """Return when all slices are done; this rank's own must be done already."""
        self._memory.done.until(self.order + 1)

    def complete(self) -> None:
        """Add this rank's slice, as soon as all ranks' tensors are ready."""
        self._memory.ready.until(self.order + 1)
        owners = len(self._parts) if self._across is None else self._across.owners
        if self._rank < owners:
            if self._before is not None:
                self._before()
            divisor = 1.0 if self._divides is None else self._divides.divisor or 1.0
            self._complete(slice_of(self._parts[0].numel(), self._rank, owners), divisor)
        self._memory.done.post(self.order + 1)
        self.finished = True

    def _complete(self, own: range, divisor: float) -> None:
        spans = []
        for start in range(own.start, own.stop, _PIECE):
            spans.append(slice(start, min(start + _PIECE, own.stop)))
        for span in spans:
            pieces = [part[span] for part in self._parts]
            if self._along is None:
                fold(pieces, "sum", pieces[self._rank])
            else:
                tensors = [tensor.data[span] for tensor in self._along.tensors]
                add_up(self._along.term, tensors, pieces[self._rank])
            if self._across is None:
                self._deliver(pieces, divisor)
        if self._across is not None:
            self._across.reduce(self._parts[self._rank][own.start : own.stop])
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
