"""Tensors as checkpoints know them: a name and an interval of elements, so that whoever owns which
part may write it.

    exp_avg/conv.weight           a whole tensor, in its shape
    exp_avg/conv.weight[64:192]   elements 64 .. 191 of it, in the order in which they lie in memory

Nothing else is known about layouts, and no number of ranks: a tensor is put together from its
intervals, in whatever files they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from lockstep.checkpoints.manifest import believed
from lockstep.errors import DamagedCheckpoint

METHOD = "method/"
"""Before the names of what a way to train keeps beside the optimizer's state; then `rank-N/` for
what only one rank has.
"""
_SHAPES, _TIED, _COMPLEX = "shapes", "tied", "complex"  # in a file's header
# which the format lacks: written as pairs of real numbers
_AS_REAL = (torch.complex128, torch.complex32)
_INTERVAL = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Some of a tensor's elements, or all of them."""

    name: str
    data: Tensor
    """The whole tensor; or, of one that has `shape` and `strides`, elements [start, stop) in the
    order of memory, flat.
    """
    start: int = 0
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """In a file."""
        return (
            self.name
            if self.shape is None
            else f"{self.name}[{self.start}:{self.start + self.data.numel()}]"
        )


@dataclass(frozen=True, slots=True)
class TensorFile:
    """What a rank writes into one file."""

    name: str
    pieces: Sequence[TensorPiece]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of tensors, each with the name that `pieces` has."""


class Keeps(Protocol):
    """A part of a training that has a state of its own, in tensors: what compression still owes,
    a meeting's momentum.
    """

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """By name, without ranks: what all ranks have alike, and what only this one has. Every
        rank calls it.
        """
        ...

    def take_back(
        self, common: Mapping[str, Tensor], by_rank: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Go on from it. `by_rank` has a place for every rank that there was then, which may be
        more or fewer than there are now.
        """
        ...


def method_pieces(parts: Sequence[Keeps], rank: int) -> tuple[list[TensorPiece], list[TensorPiece]]:
    """What these keep: what all ranks have, and what only this one has."""
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


def method_kept(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """From what a checkpoint has behind METHOD: what was common, and what each rank had."""
    common: dict[str, Tensor] = {}
    by_rank: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"rank-(\d+)/(.*)", name, re.DOTALL)
        if match is None:
            common[name] = tensor
        else:
            by_rank.setdefault(int(match[1]), {})[match[2]] = tensor
    return common, [by_rank.get(rank, {}) for rank in range(max(by_rank, default=-1) + 1)]


def write_pieces(
    file: Path, pieces: Sequence[TensorPiece], tied: Mapping[str, str] | None = None
) -> None:
    """As a safetensors file; the shapes of tensors of which only intervals are there stand in its
    header.

    `tied`: further names of tensors, each with the name that `pieces` has. They are written out
    too, so that the file loads strictly, and noted in the header, so that `read_whole` leaves them
    out. So are the names of complex tensors that are written as real ones of shape [..., 2], since
    the format lacks their dtype.
    """
    shapes = {
        piece.name: [list(piece.shape), list(piece.strides)]
        for piece in pieces
        if piece.shape is not None
    }
    tensors = {piece.key: piece.data for piece in pieces}
    tensors |= {name: tensors[first].clone() for name, first in (tied or {}).items()}
    as_real = {
        name: torch.view_as_real(tensor)
        for name, tensor in tensors.items()
        if tensor.dtype in _AS_REAL
    }
    notes = {_SHAPES: shapes, _TIED: tied, _COMPLEX: list(as_real)}
    metadata = {name: json.dumps(value) for name, value in notes.items() if value}
    file.touch()
    # as the umask says; the library would make it readable for the owner alone
    mode = file.stat().st_mode
    save_file({**tensors, **as_real}, file, metadata=metadata or None)
    file.chmod(mode)


def storable(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype can be written."""
    return dtype in _AS_REAL or _known(dtype)


@cache
def _known(dtype: torch.dtype) -> bool:
    try:
        save({"x": torch.empty(1, dtype=dtype)})
    except (KeyError, RuntimeError, SafetensorError):
        return False
    return True


def read_whole(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that is in these files, put together, one after the other. Raises
    DamagedCheckpoint where elements are missing.
    """
    shapes: dict[str, tuple[list[int], list[int]]] = {}
    places: dict[str, list[_Place]] = {}
    with ExitStack() as stack:
        for file in files:
            found = stack.enter_context(_opened(file))
            shapes |= _note(found, _SHAPES)
            for key in _keys(found):
                match = _INTERVAL.fullmatch(key)
                place = _Place(file, found, key)
                name = key
                if match and match[1] in shapes:
                    name, place.start, place.stop = match[1], int(match[2]), int(match[3])
                places.setdefault(name, []).append(place)
        for name, parts in places.items():
            with believed(parts[0].file):
                whole = _whole(name, parts, *shapes[name]) if name in shapes else parts[0].read()
            yield name, whole


def read_file(file: Path) -> dict[str, Tensor]:
    """All tensors of a file of whole tensors, by every name. Raises DamagedCheckpoint where it
    cannot be read.
    """
    with _opened(file) as found:
        return {key: _get(found, key) for key in found.keys()}  # noqa: SIM118  # no mapping: it has keys() and nothing else


@dataclass(slots=True)
class _Place:
    """Where some of a tensor's elements lie: in an open file, under this key."""

    file: Path
    found: Any
    key: str
    start: int = 0
    stop: int = 0

    def read(self) -> Tensor:
        return _get(self.found, self.key)


def _keys(found: Any) -> list[str]:
    """The names in an open file; of each tensor the first only."""
    tied = set(_note(found, _TIED))
    return [key for key in found.keys() if key not in tied]  # noqa: SIM118  # as above


def _note(found: Any, name: str) -> Any:
    """From an open file's header."""
    return json.loads((found.metadata() or {}).get(name, "{}"))


def _get(found: Any, key: str) -> Tensor:
    tensor: Tensor = found.get_tensor(key)
    return torch.view_as_complex(tensor) if key in _note(found, _COMPLEX) else tensor


def _whole(name: str, parts: list[_Place], sizes: list[int], strides: list[int]) -> Tensor:
    numel, at, found = torch.Size(sizes).numel(), 0, []
    for place in sorted(parts, key=lambda part: part.start):
        piece = place.read()
        if place.start != at or piece.shape != (place.stop - at,):
            raise _missing(place.file, name, at, numel)
        found.append(piece)
        at = place.stop
    if at != numel:
        raise _missing(parts[0].file, name, at, numel)
    return torch.cat(found).as_strided(sizes, strides).contiguous()


def _missing(file: Path, name: str, start: int, numel: int) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        "tensor-elements-missing",
        checkpoint=file.parent.name,
        file=file.name,
        tensor=name,
        start=start,
        numel=numel,
    )


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with believed(file), safe_open(file, framework="pt") as found:
        yield found


def shared_out(
    pieces: Sequence[TensorPiece], rank: int, size: int, heavy: int
) -> list[TensorPiece]:
    """Of pieces that all ranks have, those that one rank writes: about equal bytes for all,
    `heavy` counted for rank 0 beforehand.
    """
    loads = [heavy, *[0] * (size - 1)]
    mine = []
    for piece in sorted(pieces, key=lambda each: (-each.data.nbytes, each.name)):
        writer = min(range(size), key=lambda each: (loads[each], each))
        loads[writer] += piece.data.nbytes
        if writer == rank:
            mine.append(piece)
    return mine


def sizes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())
