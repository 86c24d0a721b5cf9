"""Collectives of private tensors through slots in shared memory, piece by piece.

A rank copies a piece into its next slot and says so; when all have said so, each takes what it
needs from everybody's slots, straight into its own tensor. One synchronisation a piece: a slot is
written again only when all have read what was in it. Every rank adds in the same order, along a
balanced tree (fold.py), so all have the same bits. Half-precision is added in float32.

A small message takes what Python takes for it: so tensors are detached where they come in, and
nothing here runs under torch.no_grad.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from lockstep.collectives.group import Op, working_dtype
from lockstep.collectives.shared_memory.fold import fold

PIECE = 2**20  # bytes
SLOTS = 4


class Slots(Protocol):
    """What an Exchange needs of the group's shared memory (operations.py)."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def may_write(self, piece: int) -> bool: ...
    def await_room(self, piece: int) -> None: ...
    def written(self, piece: int) -> None: ...
    def read(self, piece: int) -> None: ...
    def done(self, piece: int) -> None: ...
    def slot(
        self, rank: int, piece: int, numel: int, dtype: torch.dtype, skip: int = 0
    ) -> Tensor: ...
    def finish(self, work: Exchange) -> None: ...


class Exchange(ABC):
    """One collective, in `pieces`, which are numbered over all of the group's collectives, from
    `first` on.

    Kinds say what they `give` to their slot of a piece, and what they `take` from everybody's.
    """

    def __init__(self, slots: Slots, first: int, pieces: int) -> None:
        self.slots, self.first, self.pieces = slots, first, pieces
        self.number = 0  # among the group's collectives
        self.finished = False
        self._ahead = 0  # pieces written

    @abstractmethod
    def give(self, piece: int) -> None:
        """Write this rank's piece to its slot."""

    @abstractmethod
    def take(self, piece: int) -> None:
        """Read what everybody has written of a piece."""

    @abstractmethod
    def end(self) -> None:
        """What is left to do with the result."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the result is there. Raises PeerFailed and CollectiveTimeout, naming who
        did not come.
        """
        self.slots.finish(self)

    def write_ahead(self) -> None:
        """Write what there is room for, without waiting: the others find it when they come."""
        while self._ahead < self.pieces and self.slots.may_write(self.first + self._ahead):
            self._write()

    def _write(self) -> None:
        self.give(self._ahead)
        self.slots.written(self.first + self._ahead)
        self._ahead += 1

    def complete(self) -> None:
        for piece in range(self.pieces):
            if self._ahead <= piece:
                self.slots.await_room(self.first + piece)
                self._write()
            self.write_ahead()
            self.slots.read(self.first + piece)
            self.take(piece)
            self.slots.done(self.first + piece)
        self.end()
        self.finished = True

    def slot(self, rank: int, piece: int, like: Tensor, skip: int = 0) -> Tensor:
        return self.slots.slot(rank, self.first + piece, like.numel(), like.dtype, skip)


class AllReduce(Exchange):
    def __init__(self, slots: Slots, first: int, tensor: Tensor, op: Op) -> None:
        self._tensor, self._op = tensor, op
        self._flat = _flat(tensor, working_dtype(tensor))
        self._pieces = _cut(self._flat)
        super().__init__(slots, first, len(self._pieces))

    def give(self, piece: int) -> None:
        self.slot(self.slots.rank, piece, self._pieces[piece]).copy_(self._pieces[piece])

    def take(self, piece: int) -> None:
        mine = self._pieces[piece]
        _combine([self.slot(rank, piece, mine) for rank in range(self.slots.size)], self._op, mine)

    def end(self) -> None:
        _copy_back(self._flat, self._tensor)


class Broadcast(Exchange):
    def __init__(self, slots: Slots, first: int, tensor: Tensor, root: int) -> None:
        self._tensor, self._root = tensor, root
        self._flat = _flat(tensor, tensor.dtype)
        self._pieces = _cut(self._flat)
        super().__init__(slots, first, len(self._pieces))

    def give(self, piece: int) -> None:
        if self.slots.rank == self._root:
            self.slot(self._root, piece, self._pieces[piece]).copy_(self._pieces[piece])

    def take(self, piece: int) -> None:
        if self.slots.rank != self._root:
            self._pieces[piece].copy_(self.slot(self._root, piece, self._pieces[piece]))

    def end(self) -> None:
        _copy_back(self._flat, self._tensor)


class AllGather(Exchange):
    def __init__(
        self, slots: Slots, first: int, everybodys: Sequence[Tensor], tensor: Tensor
    ) -> None:
        self._mine = _cut(_flat(tensor, tensor.dtype))
        self._everybodys = everybodys
        self._flats = [_flat(each, each.dtype) for each in everybodys]
        self._pieces = [_cut(flat) for flat in self._flats]
        super().__init__(slots, first, len(self._mine))

    def give(self, piece: int) -> None:
        self.slot(self.slots.rank, piece, self._mine[piece]).copy_(self._mine[piece])

    def take(self, piece: int) -> None:
        for rank, pieces in enumerate(self._pieces):
            pieces[piece].copy_(self.slot(rank, piece, pieces[piece]))

    def end(self) -> None:
        for flat, tensor in zip(self._flats, self._everybodys, strict=True):
            _copy_back(flat, tensor)


class ReduceScatter(Exchange):
    """A slot holds a chunk for every rank."""

    def __init__(
        self, slots: Slots, first: int, tensor: Tensor, parts: Sequence[Tensor], op: Op
    ) -> None:
        self._tensor, self._op = tensor, op
        working = working_dtype(tensor)
        self._room = PIECE // slots.size // 64 * 64  # bytes
        self._flat = _flat(tensor, working)
        self._mine = _cut(self._flat, self._room)
        self._parts = [_cut(_flat(part, working), self._room) for part in parts]
        super().__init__(slots, first, len(self._mine))

    def give(self, piece: int) -> None:
        for rank, chunks in enumerate(self._parts):
            self.slot(self.slots.rank, piece, chunks[piece], rank * self._room).copy_(chunks[piece])

    def take(self, piece: int) -> None:
        mine = self._mine[piece]
        _combine(
            [
                self.slot(rank, piece, mine, self.slots.rank * self._room)
                for rank in range(self.slots.size)
            ],
            self._op,
            mine,
        )

    def end(self) -> None:
        _copy_back(self._flat, self._tensor)


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Its elements side by side: itself, or a copy. Of a tensor of inference mode a copy, which
    can be written to anywhere.
    """
    if tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.reshape(-1).to(dtype, copy=True)
    tensor = tensor.detach()
    return (
        tensor.view(-1)
        if dtype == tensor.dtype and tensor.is_contiguous()
        else tensor.reshape(-1).to(dtype, copy=True)
    )


def _copy_back(flat: Tensor, tensor: Tensor) -> None:
    if tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(flat.view(tensor.shape))
    elif flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _cut(flat: Tensor, room: int = PIECE) -> Sequence[Tensor]:
    if flat.nbytes <= room:
        return (flat,) if flat.numel() else ()
    pieces: Sequence[Tensor] = flat.split(room // flat.element_size())
    return pieces


def _combine(parts: list[Tensor], op: Op, out: Tensor) -> None:
    if out.dtype in (torch.float16, torch.bfloat16):
        total = fold([part.to(torch.float32) for part in parts], op)
        out.copy_(total.div_(len(parts)) if op == "mean" else total)
        return
    fold(parts, op, out=out)
    if op == "mean":
        out.div_(len(parts))
