"""Gradients in 8 bits: nearly a quarter of the bytes.

Of every 64 elements the largest is 127 (or -127), and the others are rounded to multiples of its 127th part, which travels as a float32 behind
them. Gradients begin at multiples of 64 in their bucket, so no parameter shares a scale with a larger one. Sums of such numbers do not
fit 8 bits, so owners add in float32 and quantise the sum again. Both roundings are owed: the first by the rank whose gradient it is, the
second by the owner of the slice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.compression.carry import added, sliced, to_owners
from lockstep.gradients.compression.reduction import Stages
from lockstep.gradients.layout import ALIGNMENT

BLOCK = ALIGNMENT  # elements that share a scale
_STEPS = 127


class Int8:
    """To the owners in 8 bits, added there in float32, and back in 8 bits."""

    owes = True

    def __init__(self, group: Group) -> None:
        self._group = group

    def sum(self, flat: Tensor, bucket: Bucket) -> Stages:
        rows = sliced(flat, self._group.size, BLOCK)
        leaving = quantised(rows)
        left = flat - restored(leaving, flat.dtype).flatten()[: flat.numel()]
        arriving, work = to_owners(self._group, leaving, bucket.place)
        yield work
        mine = added(restored(arriving, flat.dtype))
        packed = quantised(mine[None])
        begin = self._group.rank * mine.numel()
        owned = left[begin : begin + mine.numel()]
        owned += (mine - restored(packed, flat.dtype)[0])[: owned.numel()]
        everybodys = self._group.all_gather(packed, bucket.place)
        return restored(everybodys, flat.dtype).flatten()[: flat.numel()], left

    def kept(self) -> Mapping[str, Tensor]:
        return {}

    def take_back(self, common: Mapping[str, Tensor]) -> None:
        pass


def quantised(rows: Tensor) -> Tensor:
    """[rows, length] as int8, the scales' bytes behind them: [rows, length + 4 * length / BLOCK]. A nan or inf is in its block's scale."""
    blocks = rows.reshape(rows.shape[0], -1, BLOCK)
    scales = (blocks.abs().amax(dim=2, keepdim=True) / _STEPS).to(torch.float32)
    usable = scales.isfinite() & (scales > 0)
    steps = torch.where(usable, blocks / scales, 0.0).round_().clamp_(-_STEPS, _STEPS).to(torch.int8)
    return torch.cat([steps.flatten(1), scales.flatten(1).view(torch.int8)], dim=1)


def restored(message: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, length], of what was quantised."""
    length = message.shape[1] * BLOCK // (BLOCK + 4)
    scales = message[:, length:].clone().view(torch.float32).to(dtype)
    steps = message[:, :length].to(dtype).view(message.shape[0], -1, BLOCK)
    return (steps * scales[:, :, None]).flatten(1)
