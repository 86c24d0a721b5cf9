"""Gradients in 16 bits: half the bytes. Nothing is remembered: what rounding takes away is small, and as often up as down.

bf16 has float32's range and 8 bits of precision: nothing can overflow. fp16 has 11 bits and a range that ends at 65504, which the sum over a
large batch leaves easily: every slice is multiplied by the power of two that brings its largest element just below 2^15, which
is exact, and the power travels behind it. So fp16 cannot overflow either, and what is 2^39 times smaller than the largest is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.compression.carry import added, sliced, to_owners
from lockstep.gradients.compression.reduction import Stages

_TOP = 15  # the largest element is scaled to below 2^15
_LARGEST_SHIFT = 120  # 2^120 is still a float32


class Cast:
    """To the owners in 16 bits, added there in float32, and back in 16 bits."""

    owes = False

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        self._group = group
        self._pack, self._unpack = (scaled, unscaled) if dtype == torch.float16 else (rounded, widened)

    def sum(self, flat: Tensor, bucket: Bucket) -> Stages:
        arriving, work = to_owners(self._group, self._pack(sliced(flat, self._group.size)), bucket.place)
        yield work
        total = self._pack(added(self._unpack(arriving, flat.dtype))[None])
        everybodys = self._group.all_gather(total, bucket.place)
        return self._unpack(everybodys, flat.dtype).flatten()[: flat.numel()], None

    def kept(self) -> Mapping[str, Tensor]:
        return {}

    def take_back(self, common: Mapping[str, Tensor]) -> None:
        pass


def rounded(rows: Tensor) -> Tensor:
    return rows.to(torch.bfloat16)


def widened(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.to(dtype)


def scaled(rows: Tensor) -> Tensor:
    """Each row times its own power of two, whose exponent stands behind it; as float16, [rows, length + 1]."""
    largest = rows.abs().amax(dim=1, keepdim=True)
    exponent = torch.frexp(largest).exponent
    shift = torch.where(largest.isfinite(), _TOP - exponent, 0).clamp(max=_LARGEST_SHIFT)
    return torch.cat([rows * power_of_two(shift, rows.dtype), shift.to(rows.dtype)], dim=1).to(torch.float16)


def unscaled(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows[:, :-1].to(dtype) * power_of_two(-rows[:, -1:].to(torch.int32), dtype)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Exactly, from its bits: `pow` rounds."""
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
