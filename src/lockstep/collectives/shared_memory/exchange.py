"""Collectives of private tensors through slots in shared memory, piece by piece.

A rank copies a piece into its next slot and raises its flag. When all flags are up, each rank takes
what it needs from all slots, straight into its own tensor. There is one synchronization per piece:
a slot is written again only after all ranks have read it. Every rank adds in the same order, along
a balanced tree (collectives/addition_order.py), so all have the same bits. Half precision is added
in float32.

For a small message, most of the time is spent in Python. So tensors are detached on entry, and
nothing here runs under torch.no_grad.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.collectives.addition_order import fold
from lockstep.collectives.reduce_op import Op, working_dtype

if TYPE_CHECKING:
    from lockstep.collectives.shared_memory.operations import HostMemory

PIECE = 2**20  # bytes
SLOTS = 4
AT_ONCE = 2**17  # bytes; up to this size every rank adds the whole tensor


class Exchange(ABC):
    """One collective, done in pieces. Subclasses define what they `read_piece` from all slots.

    The pieces are numbered over all of the group's collectives; those of this one begin at `first`.

    Args:
        slots: the group's shared memory.
        first: number of this collective's first piece.
        local: this rank's pieces, which the other ranks read.
        results: flat tensors, each with the tensor that it is copied to.
    """

    def __init__(
        self,
        slots: HostMemory,
        first: int,
        local: Sequence[Tensor],
        results: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.slots = slots
        self.first = first
        self._local = local
        self._results = results
        self.pieces = len(local)
        self.number = 0  # this collective's number in the group
        self.finished = False
        self._ahead = 0  # pieces written
        self._taken = 0  # pieces; a wait that is repeated after a timeout continues here
        # an error in this collective's tensors, for `wait`; other collectives continue
        self._error: RuntimeError | None = None

    def write_piece(self, piece: int) -> None:
        """Write this rank's piece to its slot."""
        local = self._local[piece]
        self.slot(self.slots.rank, piece, local).copy_(local)

    @abstractmethod
    def read_piece(self, piece: int) -> None:
        """Read what all ranks have written of a piece."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the result is there. Raises PeerFailed, and CollectiveTimeout with the ranks
        that did not come within `timeout` (default: the group's). It can then be called again.
        """
        self.slots.finish(self, timeout)
        if self._error is not None:
            raise self._error

    def write_ahead(self) -> None:
        """Write the pieces that have a free slot, without waiting. The other ranks find them when
        they come. Pieces of an earlier collective are written first.
        """
        while (
            self._ahead < self.pieces
            and self.slots.put == self.first + self._ahead
            and self.slots.read.reached(self.first + self._ahead - SLOTS + 1)
        ):
            self._write()

    def _write(self) -> None:
        self.write_piece(self._ahead)
        self._ahead += 1
        self.slots.put = self.first + self._ahead
        self.slots.written.post(self.slots.put)

    def complete(self) -> None:
        """Do the rest of the collective, waiting for the others."""
        while self._taken < self.pieces:
            self._wait_for_piece(self._taken)
            self.read_piece(self._taken)
            self._taken += 1
            self.slots.read.post(self.first + self._taken)
        self._end()

    def _wait_for_piece(self, piece: int) -> None:
        """Return when all ranks have written this piece. At the first piece, check that they call
        the same collective.
        """
        if self._ahead <= piece:
            # all ranks must have read what was in the slot before
            self.slots.read.until(self.first + piece - SLOTS + 1)
            self._write()
        self.write_ahead()
        self.slots.written.until(self.first + piece + 1)
        if piece == 0:
            self.slots.group.fingerprints.compare(self.number)

    def _end(self) -> None:
        try:
            for flat, tensor in self._results:
                if tensor.is_inference():
                    with torch.inference_mode():
                        tensor.copy_(flat.view(tensor.shape))
                elif flat.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(flat.view(tensor.shape))
        except RuntimeError as error:  # such as an expanded tensor, whose elements share memory
            self._error = error
        self.finished = True

    def slot(self, rank: int, piece: int, like: Tensor, skip: int = 0) -> Tensor:
        return self.slots.slot(rank, self.first + piece, like.numel(), like.dtype, skip)


class AllReduce(Exchange):
    """All-reduce of a small tensor, in one piece: every rank adds all of it. A step has two of
    these, so they are written out, with few calls.
    """

    def __init__(
        self, slots: HostMemory, first: int, tensor: Tensor, op: Op, working: torch.dtype
    ) -> None:
        flat = _flat(tensor, working)
        super().__init__(slots, first, (flat,) if flat.numel() else (), [(flat, tensor)])
        self._op = op
        self._all: Sequence[Tensor] = ()  # every rank's slot

    def _write(self) -> None:
        slots = self.slots
        (flat,) = self._local
        self._all = slots.of_all_ranks(self.first, flat.numel(), flat.dtype)
        self._all[slots.rank].copy_(flat)
        self._ahead = 1
        slots.put = self.first + 1
        slots.written.post(self.first + 1)

    def read_piece(self, piece: int) -> None:
        fold(self._all, self._op, self._local[piece])

    def complete(self) -> None:
        slots = self.slots
        if self._taken < self.pieces:
            if not self._ahead:
                slots.read.until(self.first - SLOTS + 1)
                self._write()
            slots.written.until(self.first + 1)
            slots.group.fingerprints.compare(self.number)
            self.read_piece(0)
            self._taken = 1
            slots.read.post(self.first + 1)
        self._end()


class AllReduceBySlices(Exchange):
    """All-reduce of a large tensor: a rank adds its slice of each piece. It gives the sum to the
    others in its slot, where its own part of that slice would be. So each piece has a second
    synchronization, for which a rank waits after it has added the next piece.
    """

    def __init__(
        self, slots: HostMemory, first: int, tensor: Tensor, op: Op, working: torch.dtype
    ) -> None:
        flat = _flat(tensor, working)
        local = _cut(flat)
        super().__init__(slots, first, local, [(flat, tensor)])
        self._op = op
        self._collected = 0  # pieces
        share = 64 * slots.size
        self._slices = [piece.split(-(-len(piece) // share) * 64) for piece in local]

    def write_piece(self, piece: int) -> None:
        for rank, part in self._others(piece):
            self._slice_in_slot(self.slots.rank, piece, rank).copy_(part)

    def read_piece(self, piece: int) -> None:
        """Add this rank's slice."""
        rank = self.slots.rank
        if rank < len(self._slices[piece]):
            local = self._slices[piece][rank]
            parts = [self._slice_in_slot(owner, piece, rank) for owner in range(self.slots.size)]
            total = parts[rank]
            parts[rank] = local
            fold(parts, self._op, local)
            total.copy_(local)
        self.slots.reduced.post(self.first + piece + 1)

    def complete(self) -> None:
        while self._collected < self.pieces:
            if self._taken < min(self._collected + 2, self.pieces):
                self._wait_for_piece(self._taken)
                self.read_piece(self._taken)
                self._taken += 1
            else:
                self._collect(self._collected)
                self._collected += 1
        self._end()

    def _collect(self, piece: int) -> None:
        """Copy the sums of the other ranks' slices."""
        self.slots.reduced.until(self.first + piece + 1)
        for rank, part in self._others(piece):
            part.copy_(self._slice_in_slot(rank, piece, rank))
        self.slots.read.post(self.first + piece + 1)

    def _others(self, piece: int) -> list[tuple[int, Tensor]]:
        return [
            (rank, part) for rank, part in enumerate(self._slices[piece]) if rank != self.slots.rank
        ]

    def _slice_in_slot(self, owner: int, piece: int, rank: int) -> Tensor:
        """Return the part of rank `owner`'s slot for the slice of `rank`."""
        slices = self._slices[piece]
        return self.slot(owner, piece, slices[rank], rank * slices[0].nbytes)


class Broadcast(Exchange):
    def __init__(self, slots: HostMemory, first: int, tensor: Tensor, root: int) -> None:
        flat = _flat(tensor, tensor.dtype)
        super().__init__(slots, first, _cut(flat), [(flat, tensor)])
        self._root = root

    def write_piece(self, piece: int) -> None:
        if self.slots.rank == self._root:
            super().write_piece(piece)

    def read_piece(self, piece: int) -> None:
        if self.slots.rank != self._root:
            local = self._local[piece]
            local.copy_(self.slot(self._root, piece, local))


class AllGather(Exchange):
    def __init__(
        self, slots: HostMemory, first: int, gathered: Sequence[Tensor], tensor: Tensor
    ) -> None:
        flats = [_flat(result, result.dtype) for result in gathered]
        results = list(zip(flats, gathered, strict=True))
        super().__init__(slots, first, _cut(_flat(tensor, tensor.dtype)), results)
        self._pieces = [_cut(flat) for flat in flats]

    def read_piece(self, piece: int) -> None:
        for rank, pieces in enumerate(self._pieces):
            pieces[piece].copy_(self.slot(rank, piece, pieces[piece]))


class ReduceScatter(Exchange):
    """Reduce-scatter. A slot holds a chunk for every rank."""

    def __init__(
        self, slots: HostMemory, first: int, tensor: Tensor, parts: Sequence[Tensor], op: Op
    ) -> None:
        working = working_dtype(tensor)
        self._room = PIECE // slots.size // 64 * 64  # bytes
        flat = _flat(tensor, working)
        super().__init__(slots, first, _cut(flat, self._room), [(flat, tensor)])
        self._op = op
        self._parts = [_cut(_flat(part, working), self._room) for part in parts]

    def write_piece(self, piece: int) -> None:
        for rank, chunks in enumerate(self._parts):
            chunk = chunks[piece]
            self.slot(self.slots.rank, piece, chunk, rank * self._room).copy_(chunk)

    def read_piece(self, piece: int) -> None:
        local = self._local[piece]
        skip = self.slots.rank * self._room
        chunks = [self.slot(rank, piece, local, skip) for rank in range(self.slots.size)]
        fold(chunks, self._op, local)


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements as a flat, contiguous CPU tensor: a view, or a copy. An inference tensor
    is copied, because only the copy can be written to in any mode.
    """
    if tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.reshape(-1).to("cpu", dtype, copy=True)
    tensor = tensor.detach()
    if tensor.is_cpu and dtype == tensor.dtype and tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.reshape(-1).to("cpu", dtype, copy=True)


def _cut(flat: Tensor, room: int = PIECE) -> Sequence[Tensor]:
    if flat.nbytes <= room:
        return (flat,) if flat.numel() else ()
    pieces: Sequence[Tensor] = flat.split(room // flat.element_size())
    return pieces
