"""Tensors in checkpoints: a name and an interval of elements, so that any rank can write the part
that it owns (`TensorPiece`, gradients/saved_state.py).

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
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open
from torch import Tensor, nn

from lockstep.checkpoints.manifest import believed, new_digest
from lockstep.checks.identity import weights
from lockstep.collectives.plain_json import dtype_name
from lockstep.errors import DamagedCheckpoint, TaskError
from lockstep.gradients.saved_state import TensorPiece
from lockstep.runtime.disk import force

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
class TensorFile:
    """The tensors that a rank writes into one file."""

    name: str
    pieces: Sequence[TensorPiece]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied tensors, each with the name in `pieces`."""


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
    metadata = {"format": "pt"}  # PyTorch's own programs write this, and some look for it
    for name, note in ((_SHAPES, shapes), (_TIED, file.tied), (_COMPLEX, as_real)):
        if note:
            metadata[name] = json.dumps(note)
    header: dict[str, Any] = {_NOTES: metadata}
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    data_size = 0
    for name in names:
        begin = data_size
        data_size += tensors[name].nbytes
        header[name] = {**_form(tensors[name]), "data_offsets": [begin, data_size]}
    text = json.dumps(header).encode()
    text += b" " * (-(_SIZE + len(text)) % _ALIGNED)
    text = len(text).to_bytes(_SIZE, "little") + text
    start = len(text)
    if memory is None or len(memory) != start + data_size:
        # whole pages, for direct writes
        pages = mmap.mmap(-1, start + data_size, mmap.MAP_PRIVATE)
        if hasattr(mmap, "MADV_DONTFORK"):  # forked loader workers would keep copies of old pages
            pages.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory[:start] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for name in names:
        tensor = tensors[name]
        stop = start + tensor.nbytes
        memory[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start = stop
    return memory


def write(file: Path, data: Tensor, pause: Callable[[float], object] | None = None) -> str:
    """Write these bytes of an `image` to a file, force it to disk, and return their digest.

    Training continues meanwhile: the write hardly needs Python's lock, and it bypasses the page
    cache, which would take five times the processor time.

    Args:
        file: the file to make or to overwrite.
        data: uint8, in one dimension.
        pause: called after every 16 MiB but the last, with the seconds that they took.
    """
    remaining = data.numpy().data
    digest = new_digest()
    with file.open("wb", buffering=0) as stream:
        while remaining:
            begin = perf_counter()
            chunk = remaining[:_AT_ONCE]
            remaining = remaining[_AT_ONCE:]
            digest.update(chunk)  # without Python's lock
            blocks = chunk[: len(chunk) // _BLOCK * _BLOCK]
            if blocks:
                chunk = chunk[_write_direct(stream, blocks) :]
            while chunk:
                chunk = chunk[stream.write(chunk) :]
            if remaining and pause is not None:
                pause(perf_counter() - begin)
    force(file)
    return str(digest.hexdigest())


def _write_direct(stream: RawIOBase, blocks: memoryview) -> int:
    """Write these bytes past the page cache, if the file system can; return how many it took."""
    written = 0
    flags = fcntl.fcntl(stream, fcntl.F_GETFL)
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


def check_storable(model: nn.Module) -> None:
    """Raise TaskError, with name and dtype, for a tensor that a checkpoint cannot hold. Call it
    before training, not after it.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in weights(model).items():
        if tensor.is_quantized:
            problem = "quantized"
            instead = "make it dense"
        elif tensor.layout is not torch.strided:
            problem = f"in layout {tensor.layout}"
            instead = "make it dense"
        elif not storable(tensor.dtype):
            problem = f"of dtype {tensor.dtype}"
            instead = "use another dtype"
        else:
            continue
        kind = "parameter"
        if name not in parameters:
            kind = "buffer"
            instead += ", or register it with persistent=False"
        raise TaskError(
            "tensor-not-storable", tensor=f"{kind} {name}", what=problem, instead=instead
        )


def _form(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor's dtype and shape as a file's header has them."""
    dtype = tensor.dtype
    shape = list(tensor.shape)
    if dtype in _AS_REAL:
        dtype = dtype.to_real()
        shape = [*shape, 2]
    spec = TensorSpec(dtype=dtype_name(dtype), shape=shape, data_ptr=0, data_len=tensor.nbytes)
    return {"dtype": spec.dtype, "shape": spec.shape}


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
            begin = end = sum(map(operator.mul, offsets or (), strides))
            if all(sizes):
                end += 1
                for size, stride in zip(sizes, strides, strict=True):
                    end += (size - 1) * stride
            chunks = []
            for part in self.parts:
                first = max(0, begin - part.start)
                last = max(0, end - part.start)
                # as bytes: in a file they need not be aligned
                chunks.append(part.data.flatten()[first:last].view(torch.uint8))
            data = torch.cat(chunks).view(self.dtype)
            return data.as_strided(sizes, strides).contiguous()


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
        with believed(file), safe_open(file, framework="pt") as stream:
            metadata = stream.metadata() or {}
            shapes |= json.loads(metadata.get(_SHAPES, "{}"))
            tied = json.loads(metadata.get(_TIED, "{}"))
            as_real = json.loads(metadata.get(_COMPLEX, "{}"))
            keys = set(stream.keys())
            if not every_name:
                keys -= tied.keys()
            for key in keys:
                data = stream.get_tensor(key)  # maps it, and reads nothing
                if key in as_real:
                    data = torch.view_as_complex(data)
                name = key
                part = _Part(file, data)
                match = _INTERVAL.fullmatch(key)
                if match and match[1] in shapes:
                    name = match[1]
                    part.start = int(match[2])
                    part.stop = int(match[3])
                parts.setdefault(name, []).append(part)
    return {name: _assembled(name, parts[name], shapes.get(name)) for name in sorted(parts)}


def _assembled(
    name: str, parts: list[_Part], form: tuple[list[int], list[int]] | None
) -> StoredTensor:
    """Return the tensor of these parts. `form` has its sizes and strides; None: it is in one part.
    Raises DamagedCheckpoint if an element is in no part, or in two.
    """
    dtype = parts[0].data.dtype
    if form is None:
        return StoredTensor(tuple(parts[0].data.shape), None, dtype, parts[:1])
    with believed(parts[0].file):
        sizes, strides = map(tuple, form)
        numel = torch.Size(sizes).numel()
        parts = sorted(parts, key=lambda part: part.start)
        end = 0
        for part in parts:
            if part.start != end or part.data.shape != (part.stop - end,):
                break
            end = part.stop
        else:
            if end == numel:
                return StoredTensor(sizes, strides, dtype, parts)
        raise DamagedCheckpoint(
            "tensor-elements-missing",
            checkpoint=part.file.parent.name,
            file=part.file.name,
            tensor=name,
            start=end,
            numel=numel,
        )
