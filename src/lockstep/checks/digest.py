"""One number that stands for the bits of tensors: equal for equal bits in the same order, different
(but for chance) for any others.

On the CPU it is XXH3 over the memory of each tensor, at the speed of memory. Tensors of a device
are mixed there, so that only the number travels: every 64-bit word goes through a bijection that
depends on its position (the finalizer of SplitMix64: Steele et al., OOPSLA 2014), and the results
are added up. One changed word always changes that sum; two exchanged words do, but for chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

_WORD = 8  # bytes
_CHUNK = 2**25  # bytes that are mixed at once
# SplitMix64's odd constants, as signed numbers
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """A number of 64 bits, signed, for the bits of `tensors` (any dtypes, shapes, strides and
    devices), in their order.
    """
    hasher, elsewhere = xxhash.xxh3_64(), []
    for tensor in tensors:
        octets = octets_of(tensor)
        if octets.device.type == "cpu":
            hasher.update(octets.numpy().data)
        else:
            elsewhere.append(octets)
    for words in chunks(elsewhere):
        hasher.update(mixed(words).cpu().numpy().data)
    found = hasher.intdigest()
    return found - 2**64 if found >= 2**63 else found


def mixed(words: Tensor) -> Tensor:
    """The sum of what a bijection makes of each of these int64 numbers and its position; int64,
    0-d, on their device.
    """
    mixing = torch.arange(1, words.numel() + 1, device=words.device).mul_(_STEP).add_(words)
    mixing = (mixing ^ _shifted(mixing, 30)).mul_(_FIRST)
    mixing = (mixing ^ _shifted(mixing, 27)).mul_(_SECOND)
    return (mixing ^ _shifted(mixing, 31)).sum()


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def octets_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes, flat, in the order of its elements; a view of its memory where that is
    contiguous.
    """
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(-1).view(torch.uint8)


def chunks(octets: Iterable[Tensor], most: int = _CHUNK) -> Iterator[Tensor]:
    """Bytes on devices as int64 words, `most` bytes at once: small tensors together, large ones
    in pieces, filled up with zeros.
    """
    together: list[Tensor] = []
    room = most
    for each in octets:
        for piece in each.split(most):
            if together and (piece.numel() > room or piece.device != together[0].device):
                yield _words(together)
                together, room = [], most
            together.append(piece)
            room -= piece.numel()
    if together:
        yield _words(together)


def _words(pieces: list[Tensor]) -> Tensor:
    missing = -sum(piece.numel() for piece in pieces) % _WORD
    return torch.cat([*pieces, pieces[0].new_zeros(missing)]).view(torch.int64)
