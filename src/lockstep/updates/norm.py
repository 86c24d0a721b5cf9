"""The norm of all gradients, as one process would see it.

Squares are added up in blocks of fixed places, and the blocks one after the other: the same bits, whoever added up which block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.collectives.slices import BLOCK

_PIECE = 256 * BLOCK  # elements whose squares are held at a time: what fits into a core's cache


def block_sums(flat: Tensor) -> Tensor:
    """The sum of squares of every BLOCK elements of a flat tensor, in float32 or wider; shape [ceil(n / BLOCK)]."""
    if flat.device.type != "cpu":
        return _sums(flat)
    return torch.cat([_sums(piece) for piece in flat.split(_PIECE)]) if flat.numel() else _sums(flat)


def _sums(flat: Tensor) -> Tensor:
    whole = flat.numel() // BLOCK * BLOCK
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    sums = wide[:whole].square().view(-1, BLOCK).sum(1)
    return sums if whole == flat.numel() else torch.cat([sums, wide[whole:].square().sum().view(1)])


def norm_of(sums: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm from the block sums of all flat tensors, in order: float64, 0-d, on the first one's device. Nobody waits for it here."""
    device = sums[0].device
    return torch.cat([each.to(device, torch.float64) for each in sums]).sum().sqrt()


def gradient_norm(flats: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm over all elements of these flat tensors; float64, 0-d."""
    return norm_of([block_sums(flat) for flat in flats])
