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
from contextlib import contextmanager
from dataclasses import dataclass
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
class Piece:
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


def method_pieces(parts: Sequence[Keeps], rank: int) -> tuple[list[Piece], list[Piece]]:
    """What these keep: what all ranks have, and what only this one has."""
    kept = [part.kept() for part in parts]
    everywhere = [
        Piece(f"{METHOD}{name}", tensor) for common, _ in kept for name, tensor in common.items()
    ]
    return everywhere, [
        Piece(f"{METHOD}rank-{rank}/{name}", tensor)
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
    file: Path, pieces: Sequence[Piece], tied: Mapping[str, str] | None = None
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
    places: dict[str, list[tuple[Path, str, int, int]]] = {}
    shapes: dict[str, tuple[list[int], list[int]]] = {}
    for file in files:
        with _opened(file) as found:
            for name, (shape, strides) in _note(found, _SHAPES).items():
                shapes[name] = shape, strides
            for key in _keys(found):
                match = _INTERVAL.fullmatch(key)
                name = match[1] if match and match[1] in shapes else key
                interval = (int(match[2]), int(match[3])) if match and name in shapes else (0, 0)
                places.setdefault(name, []).append((file, key, *interval))
    for name, parts in places.items():
        with believed(parts[0][0]):
            whole = _whole(name, parts, shapes.get(name))
        yield name, whole


def read_file(file: Path, *, every_name: bool = False) -> dict[str, Tensor]:
    """All tensors of a file of whole tensors, by their first or by every name. Raises
    DamagedCheckpoint where it cannot be read.
    """
    with _opened(file) as found:
        return {key: _get(found, key) for key in _keys(found, every=every_name)}


def _keys(found: Any, *, every: bool = False) -> list[str]:
    """The names in an open file; each tensor's first only, unless `every` one is wanted."""
    tied = set() if every else set(_note(found, _TIED))
    return [key for key in found.keys() if key not in tied]  # noqa: SIM118  # no mapping: it has keys() and nothing else


def _note(found: Any, name: str) -> Any:
    """From an open file's header."""
    return json.loads((found.metadata() or {}).get(name, "{}"))


def _get(found: Any, key: str) -> Tensor:
    tensor: Tensor = found.get_tensor(key)
    return torch.view_as_complex(tensor) if key in _note(found, _COMPLEX) else tensor


def _whole(
    name: str,
    parts: Sequence[tuple[Path, str, int, int]],
    shape: tuple[list[int], list[int]] | None,
) -> Tensor:
    if shape is None:
        return _tensor(parts[0][0], parts[0][1])
    sizes, strides = shape
    numel, at, found = torch.Size(sizes).numel(), 0, []
    for file, key, start, stop in sorted(parts, key=lambda part: part[2]):
        piece = _tensor(file, key)
        if start != at or piece.shape != (stop - start,):
            raise DamagedCheckpoint(
                "tensor-elements-missing",
                checkpoint=file.parent.name,
                file=file.name,
                tensor=name,
                start=at,
                numel=numel,
            )
        found.append(piece)
        at = stop
    if at != numel:
        raise DamagedCheckpoint(
            "tensor-elements-missing",
            checkpoint=parts[0][0].parent.name,
            file=parts[0][0].name,
            tensor=name,
            start=at,
            numel=numel,
        )
    return torch.cat(found).as_strided(sizes, strides).contiguous()


def _tensor(file: Path, key: str) -> Tensor:
    with _opened(file) as found:
        return _get(found, key)


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    with believed(file), safe_open(file, framework="pt") as found:
        yield found


def shared_out(pieces: Sequence[Piece], rank: int, size: int, heavy: int) -> list[Piece]:
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


def plain(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, with memory of its own: what the format can hold."""
    found = tensor.detach().cpu().contiguous()
    return found.clone() if found.data_ptr() == tensor.data_ptr() else found


def sizes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())
