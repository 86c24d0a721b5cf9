"""Tensors as checkpoints know them: a name and an interval of elements, so that whoever owns which part may write it.

    exp_avg/conv.weight           a whole tensor, in its shape
    exp_avg/conv.weight[64:192]   elements 64 .. 191 of it, in the order in which they lie in memory

Nothing else is known about layouts, and no number of ranks: a tensor is put together from its intervals, in whatever files they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.errors import DamagedCheckpoint

_INTERVAL = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a tensor's elements, or all of them."""

    name: str
    data: Tensor
    """The whole tensor; or, of one that has `shape` and `strides`, elements [start, stop) in the order of memory, flat."""
    start: int = 0
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """In a file."""
        return self.name if self.shape is None else f"{self.name}[{self.start}:{self.start + self.data.numel()}]"


def write_pieces(file: Path, pieces: Sequence[Piece]) -> None:
    """As a safetensors file; the shapes of tensors of which only intervals are there stand in its header."""
    shapes = {piece.name: [list(piece.shape), list(piece.strides)] for piece in pieces if piece.shape is not None}
    save_file({piece.key: piece.data for piece in pieces}, file, metadata={"shapes": json.dumps(shapes)} if shapes else None)


def read_whole(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that is in these files, put together, one after the other. Raises DamagedCheckpoint where elements are missing."""
    places: dict[str, list[tuple[Path, str, int, int]]] = {}
    shapes: dict[str, tuple[list[int], list[int]]] = {}
    for file in files:
        with _opened(file) as found:
            for name, (shape, strides) in json.loads((found.metadata() or {}).get("shapes", "{}")).items():
                shapes[name] = shape, strides
            for key in found.keys():  # noqa: SIM118  # no mapping: it has keys() and nothing else
                match = _INTERVAL.fullmatch(key)
                name = match[1] if match and match[1] in shapes else key
                interval = (int(match[2]), int(match[3])) if match and name in shapes else (0, 0)
                places.setdefault(name, []).append((file, key, *interval))
    for name, parts in places.items():
        yield name, _whole(name, parts, shapes.get(name))


def _whole(name: str, parts: Sequence[tuple[Path, str, int, int]], shape: tuple[list[int], list[int]] | None) -> Tensor:
    if shape is None:
        return _tensor(parts[0][0], parts[0][1])
    sizes, strides = shape
    numel, at, found = torch.Size(sizes).numel(), 0, []
    for file, key, start, stop in sorted(parts, key=lambda part: part[2]):
        piece = _tensor(file, key)
        if start != at or piece.shape != (stop - start,):
            raise DamagedCheckpoint(f"{file.parent.name}: {name} lacks elements from {at} on", file.name)
        found.append(piece)
        at = stop
    if at != numel:
        raise DamagedCheckpoint(f"{parts[0][0].parent.name}: {name} has {at} of {numel} elements", parts[0][0].name)
    return torch.cat(found).as_strided(sizes, strides).contiguous()


def _tensor(file: Path, key: str) -> Tensor:
    with _opened(file) as found:
        tensor: Tensor = found.get_tensor(key)
        return tensor


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{file.parent.name}: {file.name} cannot be read: {error}", file.name) from None


def shared_out(pieces: Sequence[Piece], rank: int, size: int, heavy: int) -> list[Piece]:
    """Of pieces that all ranks have, those that one rank writes: about equal bytes for all, `heavy` counted for rank 0 beforehand."""
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
