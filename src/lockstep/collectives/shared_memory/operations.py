"""Collectives through memory that the ranks of one host share. Only torch: nothing to compile.

    memory   a line of words for each rank: how many pieces it has written, how many it has read
             from all ranks, and so on
             a few slots for each rank: each holds a piece of its tensor

Private tensors go through the slots piece by piece (exchange.py). Tensors in shared memory are
summed in place (resident.py). All of it needs the two writes of one process, first the piece, then
the word, to stay in order. x86 keeps that order; elsewhere this is not used.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.addition_order import slice_of
from lockstep.collectives.fingerprints import call_site, timed_out
from lockstep.collectives.reduce_op import Op, check_op, reduced_dtype
from lockstep.collectives.shared_memory.exchange import (
    AT_ONCE,
    PIECE,
    SLOTS,
    AllGather,
    AllReduce,
    AllReduceBySlices,
    Broadcast,
    Exchange,
    ReduceScatter,
)
from lockstep.collectives.shared_memory.one_copy import OneCopy
from lockstep.collectives.shared_memory.resident import Across, Along, Divides, Sum
from lockstep.collectives.shared_memory.segment import share
from lockstep.collectives.shared_memory.waits import Flag, Waits, crowded
from lockstep.schedules.algorithms import check_root

if TYPE_CHECKING:
    from lockstep.collectives.group import Group

# words of 8 bytes from one rank's line to the next: two cache lines, because CPUs fetch them in
# pairs
_LINE = 16
_PAGE = 4096
_VIEWS = 1024


def possible() -> bool:
    """Whether this machine keeps the order of writes that the synchronisation relies on."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def share_memory(store: dist.Store, key: str, group: Group, timeout: timedelta) -> HostMemory:
    """Return a group's shared memory. It can map more memory later. Every member calls this, on a
    host where it is `possible`.
    """
    numbers = itertools.count()

    def map_more(octets: int, *kinds: int) -> list[mmap.mmap]:
        name = f"{key}/{next(numbers)}"
        return share(store, name, group.rank, group.size, octets, timeout, kinds)

    # a page takes memory only when it is touched
    length = _header(group.size) + group.size * SLOTS * PIECE
    with torch.inference_mode(False):  # as in `slot`
        (memory,) = map_more(length, mmap.MAP_SHARED)
        return HostMemory(memory, group, map_more, crowded=crowded(_cores(store, key, group)))


def _cores(store: dist.Store, key: str, group: Group) -> list[list[int]]:
    """Return the cores on which each member may run: a launcher may have bound each to its own."""
    store.set(f"{key}/cores/{group.rank}", json.dumps(sorted(os.sched_getaffinity(0))))
    return [json.loads(store.get(f"{key}/cores/{rank}")) for rank in range(group.size)]


def _header(size: int) -> int:
    return -(-size * _LINE * 8 // _PAGE) * _PAGE


class HostMemory:
    """One group's collectives through shared memory. They run in the order in which they were
    started, which is the same on every rank.

    `more(bytes, *kinds)` maps further memory that all ranks see; every rank calls it. `crowded` is
    whether ranks share cores.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        group: Group,
        more: Callable[..., list[mmap.mmap]],
        *,
        crowded: bool,
    ) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self._more = more
        words = memoryview(memory)[: _header(group.size)].cast("q")
        self._octets = torch.frombuffer(memory, dtype=torch.uint8)
        self._waits = Waits(
            words,
            self._octets.data_ptr(),
            crowded=crowded,
            look=group.look,
            late=self._late,
            timeout=lambda: self._timeout().total_seconds(),
        )
        lines = [rank * _LINE for rank in range(group.size)]

        def flag(word: int) -> Flag:
            return Flag(self._waits, [line + word for line in lines], group.rank)

        self.written = flag(0)
        self.reduced = flag(1)
        self.read = flag(2)
        self.ready = flag(3)
        self.done = flag(4)
        self._updated = flag(5)
        self._copied = flag(6)
        self._sums = 0  # sums that were started
        self._gathers = 0
        # views of slots, because making a view takes longer than a small message
        self._views: dict[tuple[int, int, torch.dtype, int], Tensor] = {}
        self._of_all_ranks: dict[tuple[int, int, torch.dtype], Sequence[Tensor]] = {}
        self._slots_begin = _header(group.size)
        self._pieces = 0  # pieces of all collectives that were started
        self.put = 0  # pieces that this rank has written
        self._open: deque[Exchange | Sum] = deque()
        self._number = 0  # the collective that is running
        self._patience: timedelta | None = None  # timeout of the current wait; None: the group's

    def close(self) -> None:
        """Release the memory. It is freed with the last process that maps it."""
        self._waits.close()

    def all_reduce(self, tensor: Tensor, op: Op = "sum", place: str | None = None) -> Exchange:
        """Start to replace `tensor` on every rank by the sum (mean, max, min, prod) over all
        ranks.
        """
        working = reduced_dtype(op, tensor.dtype, tensor.layout)
        algorithm = AllReduce if tensor.nbytes <= AT_ONCE else AllReduceBySlices
        # may run out of memory, so it comes before the collective gets its number
        work = algorithm(self, self._pieces, tensor, op, working)
        self.group.announce("all_reduce", tensor, op, place, tensor.nbytes)
        return self._start(work)

    def broadcast(
        self, tensor: Tensor, root: int = 0, place: str | None = None, text: str | None = None
    ) -> Exchange:
        """Start to replace `tensor` on every rank by that of rank `root`."""
        check_root(root, self.size)
        work = Broadcast(self, self._pieces, tensor, root)
        sends = tensor.nbytes if self.rank == root else 0
        self.group.announce("broadcast", tensor, f"from {root}", place, sends, text)
        return self._start(work)

    def all_gather(
        self,
        gathered: Sequence[Tensor],
        tensor: Tensor,
        place: str | None = None,
        text: str | None = None,
    ) -> Exchange:
        """Start to fill `gathered[r]` with rank r's `tensor`, all of one shape and dtype."""
        work = AllGather(self, self._pieces, gathered, tensor)
        self.group.announce("all_gather", tensor, "", place, tensor.nbytes, text)
        return self._start(work)

    def reduce_scatter(
        self, tensor: Tensor, parts: Sequence[Tensor], op: Op = "sum", place: str | None = None
    ) -> Exchange:
        """Start to replace `tensor` on rank r by the sum (mean, ...) over all ranks of
        `parts[r]`, all of one shape and dtype.
        """
        check_op(op, tensor)
        work = ReduceScatter(self, self._pieces, tensor, parts, op)
        self.group.announce("reduce_scatter", tensor, op, place, (self.size - 1) * tensor.nbytes)
        return self._start(work)

    def _start(self, work: Exchange) -> Exchange:
        work.number = self.group.number
        self._pieces += work.pieces
        self._open.append(work)
        work.write_ahead()
        return work

    def allocate(
        self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], place: str | None = None
    ) -> list[list[Tensor]]:
        """Return tensors of zeros in shared memory, of these numbers of elements: `found[i][r]` is
        tensor i of rank r. Every rank calls it with the same arguments.
        """
        length = self._agree(sizes, dtypes, place)
        (memory,) = self._more(length * self.size, mmap.MAP_SHARED)
        regions = torch.frombuffer(memory, dtype=torch.uint8).split(length)
        by_rank = [_tensors_in(region, sizes, dtypes) for region in regions]
        return list(map(list, zip(*by_rank, strict=True)))

    def allocate_once(
        self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], place: str | None = None
    ) -> OneCopy:
        """As `allocate`, but all ranks have the same tensors, and each rank has its own view of
        them.
        """
        length = self._agree(sizes, dtypes, place)
        shared, private = self._more(length, mmap.MAP_SHARED, mmap.MAP_PRIVATE)
        return OneCopy(shared, private, lambda octets: _tensors_in(octets, sizes, dtypes))

    def _agree(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], place: str | None) -> int:
        """Return how many bytes these tensors take, after checking that it is the same on all
        ranks.
        """
        length = max(_PAGE, sum(map(_whole_pages, sizes, dtypes)))
        self.group.say(f"shared memory of {length} bytes {place or call_site()}")
        self.group.wait_for_all(self.group.number)
        return length

    def synchronize(self, place: str) -> None:
        """Return when every rank has called this."""
        self.finish_all()
        self.group.say(f"synchronize {place}")
        self._number = self.group.number
        self._await_updated()
        self.group.ended(self._number)

    def _await_updated(self) -> None:
        self._gathers += 1
        self._updated.post(self._gathers)
        self._updated.until(self._gathers)

    def sum_in_place(
        self,
        parts: Sequence[Tensor],
        place: str | None = None,
        *,
        divides: Divides | None = None,
        before: Callable[[], None] | None = None,
        scattered: bool = False,
        across: Across | None = None,
        along: Along | None = None,
    ) -> Sum:
        """Start to replace a tensor of `allocate` (`parts[r]` is rank r's) by the sum over all
        ranks. With `scattered`, each rank only gets its slice of the sum.

        `wait` calls `before()` when all tensors are ready, and divides the sum by
        `divides.divisor`, on all ranks. Nobody may touch the tensor until `wait` returns. With
        `across` it is the sum over several hosts, each of which calls this. With `along` it is the
        sum of other tensors of `allocate`.
        """
        kind = "reduce_scatter" if scattered else "all_reduce"
        self.group.announce(kind, parts[self.rank], "sum in place", place, sends=0)
        # `data` hides these writes from the version counters, by which a Reducer sees its caller's
        # writes
        work = Sum(
            self,
            [part.data for part in parts],
            self.rank,
            self._sums,
            self.group.number,
            divides,
            before,
            scattered=scattered,
            across=across,
            along=along,
        )
        self._sums += 1
        self._open.append(work)
        self.ready.post(work.order + 1)
        return work

    def gather_slices(self, tensors: Sequence[Sequence[Tensor]], place: str | None = None) -> None:
        """Copy each rank's slice of these tensors (of `allocate`) from its region into this rank's.
        Return when all ranks have done so.

        From then on no rank reads this rank's memory, so the caller may write to it.
        """
        self.finish_all()
        rank = self.rank
        size = self.size
        sends = (size - 1) * sum(tensor[rank].nbytes for tensor in tensors) // size
        self._number = self.group.announce(
            "all_gather", tensors[0][rank], "slices in place", place, sends
        )
        self._await_updated()
        for by_rank in tensors:
            local = by_rank[rank].data
            for other, remote in enumerate(by_rank):
                if other != rank:
                    part = slice_of(remote.numel(), other, size)
                    local[part.start : part.stop].copy_(remote[part.start : part.stop])
        self._copied.post(self._gathers)
        self._copied.until(self._gathers)
        self.group.ended(self._number)

    def nap(self) -> None:
        """From now on sleep in every wait. For a thread that finishes what was started, while
        another thread computes.
        """
        self._waits.nap()

    def finish_all(self, timeout: timedelta | None = None) -> None:
        """Finish everything that was started; `timeout` is as for `finish`."""
        if self._open:
            self.finish(self._open[-1], timeout)

    def slot(self, rank: int, piece: int, numel: int, dtype: torch.dtype, skip: int = 0) -> Tensor:
        """Return the memory where rank `rank` writes, or wrote, a piece: `numel` elements, `skip`
        bytes after the start of the slot.
        """
        key = rank * SLOTS + piece % SLOTS, numel, dtype, skip
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            start = self._slots_begin + key[0] * PIECE + skip
            with torch.inference_mode(False):
                # the view is kept, and one made in inference mode could be written to in that mode
                # only
                stop = start + numel * dtype.itemsize
                view = self._octets[start:stop].view(dtype)
                self._views[key] = view
        return view

    def of_all_ranks(self, piece: int, numel: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return the memory where each rank wrote a piece."""
        key = piece % SLOTS, numel, dtype
        slots = self._of_all_ranks.get(key)
        if slots is None:
            if len(self._of_all_ranks) >= _VIEWS:
                self._of_all_ranks.clear()
            slots = [self.slot(rank, piece, numel, dtype) for rank in range(self.size)]
            self._of_all_ranks[key] = slots
        return slots

    def finish(self, work: Exchange | Sum, timeout: timedelta | None = None) -> None:
        """Finish everything that was started before this, and this. The other ranks have `timeout`
        to come to each (default: the group's).
        """
        before = self._patience
        self._patience = timeout
        try:
            while self._open and not work.finished:
                self._number = self._open[0].number
                self._open[0].complete()
                self._open.popleft()
                if self.group.record is not None:
                    self.group.record.end(self._number)
        finally:
            self._patience = before

    def _late(self, missing: Sequence[int]) -> Exception:
        ranks = [self.group.ranks[rank] for rank in missing]
        call = self.group.fingerprints.text_of(self._number)
        return timed_out(self._number, call, ranks, self._timeout())

    def _timeout(self) -> timedelta:
        return self.group.timeout if self._patience is None else self._patience


def _whole_pages(size: int, dtype: torch.dtype) -> int:
    return -(-size * dtype.itemsize // _PAGE) * _PAGE


def _tensors_in(
    octets: Tensor, sizes: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Return tensors in this memory, one after the other. Each begins on a new page."""
    storage = octets.untyped_storage()
    start = octets.storage_offset()
    tensors = []
    for size, dtype in zip(sizes, dtypes, strict=True):
        # a storage for each: torch.save refuses a storage that is viewed as several dtypes
        room = storage[start : start + size * dtype.itemsize]
        tensors.append(torch.empty(0, dtype=dtype).set_(room, 0, (size,), (1,)))
        start += _whole_pages(size, dtype)
    return tensors
