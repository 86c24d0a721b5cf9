"""All-reduce through memory that the ranks of one host share, in torch: nothing to compile.

    memory   a line of words a rank: how many pieces it has written, and how many it has read from everybody
             for every rank a few slots, each holds a piece of its tensor

A rank copies a piece into its next slot and says so; when all have said so, each adds up everybody's slots, straight into its own tensor.
One synchronisation a piece: a slot is written again only when all have read what was in it. Every rank adds in the same order, along the
balanced tree ((0+1)+(2+3))+..., so all have the same bits. Half-precision is added in float32.

The order of two writes of one process, piece then word, is kept by x86; elsewhere this is not used.
"""

from __future__ import annotations

import mmap
import platform
import sys
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from lockstep.collectives.group import Group, Op, check_op, working_dtype
from lockstep.collectives.shared_memory.fold import fold
from lockstep.collectives.shared_memory.resident import Sum
from lockstep.collectives.shared_memory.waits import Waits
from lockstep.collectives.slices import slice_of
from lockstep.collectives.tags import listed
from lockstep.errors import CollectiveTimeout

PIECE = 2 * 2**20  # bytes
SLOTS = 4
_LINE = 16  # words of 8 bytes between two ranks' words: two cache lines, because neighbours are fetched in pairs
_WRITTEN, _READ, _READY, _DONE, _UPDATED, _COPIED = range(6)
_PAGE = 4096


def possible() -> bool:
    """Whether this machine keeps the order of writes that the synchronisation relies on."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def length(size: int) -> int:
    """Bytes of memory for that many ranks; pages are taken only when touched."""
    return _header(size) + size * SLOTS * PIECE


def _header(size: int) -> int:
    return -(-size * _LINE * 8 // _PAGE) * _PAGE


class SharedMemory:
    """One group's collectives through shared memory. They are done in the order in which they were started, on every rank the same.

    `more(bytes)` maps further memory that all ranks see; every rank calls it.
    """

    def __init__(self, memory: mmap.mmap, group: Group, more: Callable[[int], mmap.mmap]) -> None:
        self._memory = memory
        self._group = group
        self._more = more
        self._words = memoryview(memory)[: _header(group.size)].cast("q")
        self._octets = torch.frombuffer(memory, dtype=torch.uint8)
        self._waits = Waits(self._words, group.size, group.look, self._late)
        lines = [rank * _LINE for rank in range(group.size)]
        self._written, self._read = [line + _WRITTEN for line in lines], [line + _READ for line in lines]
        self._ready, self._done = [line + _READY for line in lines], [line + _DONE for line in lines]
        self._updated, self._copied = [line + _UPDATED for line in lines], [line + _COPIED for line in lines]
        self._sums = 0  # started
        self._gathers = 0
        self._mine = group.rank * _LINE
        self._given = 0  # pieces that started operations have numbered
        self._open: deque[Reduction | Sum] = deque()
        self._number = 0  # of the one that is being done

    def close(self) -> None:
        """Forget the memory; it goes with the last process that maps it."""
        self._words.release()

    def all_reduce(self, tensor: Tensor, op: Op = "sum", place: str | None = None) -> Reduction:
        """Start to replace `tensor` on every rank by the sum (mean, max, min, prod) over all ranks."""
        check_op(op, tensor)
        self._group.announce("all_reduce", tensor, op, place, tensor.numel() * tensor.element_size())
        work = Reduction(self, tensor, op, self._given, self._group.number)
        self._given += len(work)
        self._open.append(work)
        work.write_ahead()
        return work

    def allocate(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], place: str | None = None) -> list[list[Tensor]]:
        """Zeros in shared memory, of these numbers of elements: `found[i][r]` is tensor i of rank r. Every rank calls it alike."""
        starts, end = [], 0
        for size, dtype in zip(sizes, dtypes, strict=True):
            starts.append(end)
            end += -(-size * dtype.itemsize // _PAGE) * _PAGE
        self._group.say(f"shared memory of {end} bytes {place or ''}")
        self._group.wait_for_all(self._group.number)
        octets = torch.frombuffer(self._more(max(1, end) * self._group.size), dtype=torch.uint8)
        regions = octets.split(max(1, end))
        return [
            [region[start : start + size * dtype.itemsize].view(dtype).data for region in regions]  # a version counter each
            for start, size, dtype in zip(starts, sizes, dtypes, strict=True)
        ]

    def sum_in_place(
        self, parts: Sequence[Tensor], place: str | None = None, *, divisor: Callable[[], float] = lambda: 1.0, scattered: bool = False
    ) -> Sum:
        """Start to replace a tensor of `allocate` (`parts[r]` is rank r's) by the sum over all ranks, everywhere or each slice on its rank.

        The sum is divided by what `divisor()` is, on all ranks, when it is waited for. From here until then nobody may touch the tensor.
        """
        kind = "reduce_scatter" if scattered else "all_reduce"
        self._group.announce(kind, parts[self._group.rank], "sum in place", place, sends=0)
        parts = [part.data for part in parts]  # not seen by version counters, with which a Reducer looks whether its caller wrote
        work = Sum(self, parts, self._group.rank, self._sums, self._group.number, divisor, scattered=scattered)
        self._sums += 1
        self._open.append(work)
        self.say_ready(work.order)
        return work

    @torch.no_grad()
    def gather_slices(self, tensors: Sequence[Sequence[Tensor]], place: str | None = None) -> None:
        """Copy each rank's slice of these tensors (of `allocate`) from its region into this rank's, and return.

        Others may still read this rank's slices: nobody writes to them before `settle`.
        """
        self.finish_all()
        rank, size = self._group.rank, self._group.size
        sends = (size - 1) * sum(tensor[rank].nbytes for tensor in tensors) // size
        self._number = self._group.announce("all_gather", tensors[0][rank], "slices in place", place, sends)
        self._gathers += 1
        self._words[self._mine + _UPDATED] = self._gathers
        self._waits.until(self._updated, self._gathers, self._timeout)
        for everybodys in tensors:
            for other, theirs in enumerate(everybodys):
                if other != rank:
                    part = slice_of(theirs.numel(), other, size)
                    everybodys[rank][part.start : part.stop].copy_(theirs[part.start : part.stop])
        self._words[self._mine + _COPIED] = self._gathers

    def settle(self) -> None:
        """Return when all have copied what they gathered last."""
        self._waits.until(self._copied, self._gathers, self._timeout)

    def finish_all(self) -> None:
        """Do everything that was started."""
        if self._open:
            self.finish(self._open[-1])

    # -- for a Sum -----------------------------------------------------------------------------------------------------------------

    def say_ready(self, order: int) -> None:
        self._words[self._mine + _READY] = order + 1

    def await_ready(self, order: int) -> None:
        self._waits.until(self._ready, order + 1, self._timeout)

    def say_done(self, order: int) -> None:
        self._words[self._mine + _DONE] = order + 1

    def await_done(self, order: int) -> None:
        self._waits.until(self._done, order + 1, self._timeout)

    # -- for a Reduction -----------------------------------------------------------------------------------------------------------

    def may_write(self, piece: int) -> bool:
        """Whether everybody has read what was in this piece's slot."""
        least = piece - SLOTS + 1
        return all(self._words[place] >= least for place in self._read)

    def write(self, piece: int, content: Tensor) -> None:
        """Put a piece into its slot, as soon as that is free."""
        self._waits.until(self._read, piece - SLOTS + 1, self._timeout)
        self.slot(self._group.rank, piece, content.numel(), content.dtype).copy_(content)
        self._words[self._mine + _WRITTEN] = piece + 1

    def read(self, piece: int) -> None:
        """Return when everybody has written this piece."""
        self._waits.until(self._written, piece + 1, self._timeout)

    def done(self, piece: int) -> None:
        self._words[self._mine + _READ] = piece + 1

    def slot(self, rank: int, piece: int, numel: int, dtype: torch.dtype) -> Tensor:
        start = _header(self._group.size) + (rank * SLOTS + piece % SLOTS) * PIECE
        return self._octets[start : start + numel * dtype.itemsize].view(dtype)

    def finish(self, work: Reduction | Sum) -> None:
        """Do everything that was started before this, and this."""
        while self._open and not work.finished:
            self._number = self._open[0].number
            self._open[0].complete()
            self._open.popleft()

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def _timeout(self) -> float:
        return self._group.timeout.total_seconds()

    def _late(self, missing: Sequence[int]) -> Exception:
        ranks = [self._group.ranks[rank] for rank in missing]
        what = self._group.tags.said(self._number) if self._group.tags is not None else "shared memory"
        return CollectiveTimeout(f"#{self._number}: {what}: {listed(ranks)} did not come within {self._timeout:g} s", ranks)


class Reduction:
    """One all-reduce, in pieces."""

    def __init__(self, memory: SharedMemory, tensor: Tensor, op: Op, first: int, number: int) -> None:
        self._memory, self._tensor, self._op, self._first = memory, tensor, op, first
        working = working_dtype(tensor)
        whole = working == tensor.dtype and tensor.is_contiguous()
        self._flat = tensor.detach().view(-1) if whole else tensor.detach().reshape(-1).to(working, copy=True)
        self._pieces = self._flat.split(PIECE // self._flat.element_size()) if self._flat.numel() else ()
        self._ahead = 0  # pieces written
        self.number = number
        self.finished = False

    def __len__(self) -> int:
        return len(self._pieces)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the tensor holds the result. Raises PeerFailed and CollectiveTimeout, naming who did not come."""
        self._memory.finish(self)

    def write_ahead(self) -> None:
        """Write what there is room for, without waiting: the others find it when they come."""
        while self._ahead < len(self._pieces) and self._memory.may_write(self._first + self._ahead):
            self._write()

    def _write(self) -> None:
        self._memory.write(self._first + self._ahead, self._pieces[self._ahead])
        self._ahead += 1

    @torch.no_grad()
    def complete(self) -> None:
        for number, piece in enumerate(self._pieces):
            if self._ahead <= number:
                self._write()
            self.write_ahead()
            place = self._first + number
            self._memory.read(place)
            self._add_up(place, piece)
            self._memory.done(place)
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat.view(self._tensor.shape))
        self.finished = True

    def _add_up(self, place: int, piece: Tensor) -> None:
        slots = [self._memory.slot(rank, place, piece.numel(), piece.dtype) for rank in range(self._memory.size)]
        if piece.dtype in (torch.float16, torch.bfloat16):
            slots = [slot.to(torch.float32) for slot in slots]
            total = fold(slots, self._op)
            piece.copy_(total.div_(self._memory.size) if self._op == "mean" else total)
            return
        fold(slots, self._op, out=piece)
        if self._op == "mean":
            piece.div_(self._memory.size)
