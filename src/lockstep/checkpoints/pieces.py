"""Tensors in checkpoints: a name and an interval of elements, so that any rank can write the part
that it owns.

    exp_avg/conv.weight           a whole tensor, in its shape
    exp_avg/conv.weight[64:192]   its elements 64 .. 191, in the order in which they lie in memory

Files hold nothing else about layouts, and no number of ranks: a tensor is assembled from its
intervals, in whatever files they are.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, TensorSpec, safe_open
from torch import Tensor

from lockstep.checkpoints.manifest import believed, new_digest
from lockstep.errors import DamagedCheckpoint
from lockstep.runtime.disk import force

if TYPE_CHECKING:
    from lockstep.checkpoints.files import Checkpoint

METHOD = "method/"
"""Prefix of the names of state that a training method keeps besides the optimizer's. Under it,
`rank-N/` is what only one rank has.
"""
_BLOCK = 4096  # bytes; writes past the page cache must be multiples of this
_AT_ONCE = 2**24  # bytes
_SIZE, _ALIGNED = 8, 64  # bytes: of the header's length field; alignment of the data
_NOTES, _SHAPES, _TIED, _COMPLEX = "__metadata__", "shapes", "tied", "complex"  # in the header
# dtypes that the format lacks: written as pairs of real numbers
_AS_REAL = (torch.complex128, torch.complex32)
_INTERVAL = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Some of a tensor's elements, or all of them."""

    name: str
    data: Tensor
    """The whole tensor; or, if `shape` and `strides` are given, its elements from `start` on in the
    order of memory, flat.
    """
    start: int = 0
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The piece's name in a file."""
        return (
            self.name
            if self.shape is None
            else f"{self.name}[{self.start}:{self.start + self.data.numel()}]"
        )


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The tensors that a rank writes into one file."""

    name: str
    pieces: Sequence[TensorPiece]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied tensors, each with the name in `pieces`."""


class Keeps(Protocol):
    """A part of a training with a state of its own in tensors: what compression has not sent yet,
    an outer optimizer's momentum.
    """

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return the state by name, without ranks: what is equal on all ranks, and what only this
        rank has. Every rank calls it.
        """
        return {}, {}

    def take_back(
        self, common: Mapping[str, Tensor], by_rank: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Restore the state. `by_rank` has an entry for every rank of the run that saved it, which
        may be more or fewer than there are now.
        """
        return


def method_pieces(parts: Sequence[Keeps], rank: int) -> tuple[list[TensorPiece], list[TensorPiece]]:
    """Return the pieces of these states that all ranks have, and those that only this rank has."""
    kept = [part.kept() for part in parts]
    everywhere = [
        TensorPiece(f"{METHOD}{name}", tensor)
        for common, _ in kept
        for name, tensor in common.items()
    ]
    return everywhere, [
        TensorPiece(f"{METHOD}rank-{rank}/{name}", tensor)
        for _, own in kept
        for name, tensor in own.items()
    ]


def method_kept(
    tensors: Mapping[str, Tensor], checkpoint: Checkpoint
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Divide the tensors under METHOD of a checkpoint: what was common, and what each rank had.

    Raises DamagedCheckpoint for the number of a rank that is not below the number of files: every
    rank that had something wrote a file.
    """
    common: dict[str, Tensor] = {}
    by_rank: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"rank-(\d+)/(.*)", name, re.DOTALL)
        if match is None:
            common[name] = tensor
            continue
        digits, key = match.groups()
        if len(digits) > 9 or int(digits) >= len(checkpoint.entries):
            raise DamagedCheckpoint(
                "state-of-unknown-owner", checkpoint=checkpoint.folder.name, file=METHOD + name
            )
        by_rank.setdefault(int(digits), {})[key] = tensor
    return common, [by_rank.get(rank, {}) for rank in range(max(by_rank, default=-1) + 1)]


def image(file: TensorFile, memory: Tensor | None = None) -> Tensor:
    """Return the bytes of a safetensors file, with copies of the pieces as they are now. They are
    in `memory` if that has the right size.

    The header has the shapes of tensors that are stored in intervals. The names in `tied` have
    bytes of their own, so that the file loads strictly; the header lists them, so that `stored`
    leaves them out. The header also lists the complex tensors that are written as real ones of
    shape [..., 2], because the format lacks their dtype.
    """
    shapes = {
        piece.name: [list(piece.shape), list(piece.strides)]
        for piece in file.pieces
        if piece.shape is not None
    }
    tensors = {piece.key: piece.data.detach() for piece in file.pieces}
    tensors |= {name: tensors[first] for name, first in file.tied.items()}
    as_real = [name for name, tensor in tensors.items() if tensor.dtype in _AS_REAL]
    notes = {_SHAPES: shapes, _TIED: file.tied, _COMPLEX: as_real}
    header: dict[str, Any] = {
        _NOTES: {
            "format": "pt",  # PyTorch's own programs write this, and some look for it
            **{name: json.dumps(note) for name, note in notes.items() if note},
        }
    }
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].itemsize, each[0]))
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {**_form(tensor), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(_SIZE + len(text)) % _ALIGNED)
    text = len(text).to_bytes(_SIZE, "little") + text
    at = len(text)
    if memory is None or len(memory) != at + end:
        pages = mmap.mmap(-1, at + end, mmap.MAP_PRIVATE)  # whole pages, for direct writes
        if hasattr(mmap, "MADV_DONTFORK"):  # forked loader workers would keep copies of old pages
            pages.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory[:at] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for _, tensor in ordered:
        place = memory[at : at + tensor.nbytes]
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        at += tensor.nbytes
    return memory


def write(file: Path, octets: Tensor, pause: Callable[[float], object] | None = None) -> str:
    """Write these bytes of an `image` to a file, force it to disk, and return their digest.

    Training continues meanwhile: the write hardly needs Python's lock, and it bypasses the page
    cache, which would take five times the processor time.

    Args:
        file: the file to make or to overwrite.
        octets: uint8, in one dimension.
        pause: called after every 16 MiB but the last, with the seconds that they took.
    """
    left, digest = octets.numpy().data, new_digest()
    with file.open("wb", buffering=0) as stream:
        while left:
            begin = perf_counter()
            piece, left = left[:_AT_ONCE], left[_AT_ONCE:]
            digest.update(piece)  # without Python's lock
            if blocks := piece[: len(piece) // _BLOCK * _BLOCK]:
                piece = piece[_write_direct(stream, blocks) :]
            while piece:
                piece = piece[stream.write(piece) :]
            if left and pause is not None:
                pause(perf_counter() - begin)
    force(file)
    return str(digest.hexdigest())


def _write_direct(stream: RawIOBase, blocks: memoryview) -> int:
    """Write these bytes past the page cache, if the file system can; return how many it took."""
    written, flags = 0, fcntl.fcntl(stream, fcntl.F_GETFL)
    try:
        fcntl.fcntl(stream, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
        while written < len(blocks):
            written += stream.write(blocks[written:]) or 0
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        fcntl.fcntl(stream, fcntl.F_SETFL, flags)
    return written


def storable(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype can be written."""
    try:
        _form(torch.empty(0, dtype=dtype))
    except SafetensorError:
        return False
    return True


def _form(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor's dtype and shape as a file's header has them."""
    dtype, shape = tensor.dtype, list(tensor.shape)
    if dtype in _AS_REAL:
        dtype, shape = dtype.to_real(), [*shape, 2]
    name = str(dtype).removeprefix("torch.")
    found = TensorSpec(dtype=name, shape=shape, data_ptr=0, data_len=tensor.nbytes)
    return {"dtype": found.dtype, "shape": found.shape}


@dataclass(slots=True)
class _Part:
    """Elements [start, stop) of a tensor, or all of them, mapped from a file."""

    file: Path
    data: Tensor
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in files that is not read yet."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """Strides of its elements in `parts`; None: contiguous."""
    dtype: torch.dtype
    parts: Sequence[_Part]

    def read(
        self, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Return the whole tensor, or the box of `lengths` elements from `offsets` on (one number
        per dim). The result is a copy, which does not depend on the files any more.

        Reads only what lies between the box's first and last element. Raises DamagedCheckpoint.
        """
        with believed(self.parts[0].file):
            strides = self.strides or torch.empty(self.shape, device="meta").stride()
            sizes = self.shape if lengths is None else tuple(lengths)
            begin = sum(map(operator.mul, offsets or (), strides))
            reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
            end = begin + reach + 1 if all(sizes) else begin
            found = [
                part.data.flatten()[max(0, begin - part.start) : max(0, end - part.start)]
                for part in self.parts
            ]
            # as bytes: in a file they need not be aligned
            octets = torch.cat([each.view(torch.uint8) for each in found])
            return octets.view(self.dtype).as_strided(sizes, strides).contiguous()


def read_all(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Read all of them, with as many threads as torch has, up to four: more did not help."""
    with ThreadPoolExecutor(min(4, torch.get_num_threads())) as pool:
        return dict(zip(tensors, pool.map(StoredTensor.read, tensors.values()), strict=True))


def stored(files: Sequence[Path], *, every_name: bool = False) -> dict[str, StoredTensor]:
    """Return every tensor in these files, assembled; a tied one only under its first name, unless
    `every_name`. Raises DamagedCheckpoint if elements are missing.
    """
    shapes: dict[str, tuple[list[int], list[int]]] = {}
    parts: dict[str, list[_Part]] = {}
    for file in files:
        with believed(file), safe_open(file, framework="pt") as found:
            said = found.metadata() or {}
            notes = {name: json.loads(said.get(name, "{}")) for name in (_SHAPES, _TIED, _COMPLEX)}
            shapes |= notes[_SHAPES]
            for key in set(found.keys()) - ({} if every_name else notes[_TIED]).keys():
                data = found.get_tensor(key)  # maps it, and reads nothing
                part = _Part(file, torch.view_as_complex(data) if key in notes[_COMPLEX] else data)
                match, name = _INTERVAL.fullmatch(key), key
                if match and match[1] in shapes:
                    name, part.start, part.stop = match[1], int(match[2]), int(match[3])
                parts.setdefault(name, []).append(part)
    return {name: _whole(name, each, shapes.get(name)) for name, each in sorted(parts.items())}


def _whole(name: str, parts: list[_Part], laid: tuple[list[int], list[int]] | None) -> StoredTensor:
    first = parts[0].data
    if laid is None:
        return StoredTensor(tuple(first.shape), None, first.dtype, parts[:1])
    with believed(parts[0].file):
        sizes, strides = map(tuple, laid)
        ordered, at = sorted(parts, key=lambda part: part.start), 0
        for part in ordered:
            if part.start != at or part.data.shape != (part.stop - at,):
                break
            at = part.stop
        else:
            if at == torch.Size(sizes).numel():
                return StoredTensor(sizes, strides, first.dtype, ordered)
        raise DamagedCheckpoint(
            "tensor-elements-missing",
            checkpoint=part.file.parent.name,
            file=part.file.name,
            tensor=name,
            start=at,
            numel=torch.Size(sizes).numel(),
        )


def shared_out(
    pieces: Sequence[TensorPiece], rank: int, size: int, heavy: int
) -> list[TensorPiece]:
    """Of pieces that all ranks have, return those that this rank writes. All ranks get about equal
    bytes; rank 0 has `heavy` bytes already.
    """
    loads = [heavy, *[0] * (size - 1)]
    mine = []
    for piece in sorted(pieces, key=lambda each: (-each.data.nbytes, each.name)):
        writer = min(range(size), key=lambda each: (loads[each], each))
        loads[writer] += piece.data.nbytes
        if writer == rank:
            mine.append(piece)
    return mine
