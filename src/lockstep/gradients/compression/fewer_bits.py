"""Compressors that send fewer bits per element.

Cast    16 bits. Nothing is owed: what rounding leaves out is small, and as often up as down
Int8    8 bits: nearly a quarter of the bytes
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.compression.compressed import (
    Compressor,
    Stages,
    added,
    sliced,
    to_owners,
)
from lockstep.gradients.layout import ALIGNMENT

_TOP = 15  # scaling brings the largest element below 2^15
_LARGEST_SHIFT = 120  # 2^120 is still a float32
BLOCK = ALIGNMENT  # elements that share a scale
_STEPS = 127


class Cast(Compressor):
    """Sends slices to their owners in 16 bits, adds them there in float32, and returns 16 bits.

    bf16 has float32's range and 8 bits of precision: nothing can overflow. fp16 has 11 bits, and
    its range ends at 65504, which the sum over a large batch easily exceeds. So every slice is
    multiplied by the power of two that brings its largest element just below 2^15. This is exact,
    and the exponent travels behind the slice. So fp16 cannot overflow either, but elements 2^39
    times smaller than the largest are lost.
    """

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        self._group = group
        if dtype == torch.float16:
            self._pack = scaled
            self._unpack = unscaled
        else:
            self._pack = rounded
            self._unpack = widened

    def sum(self, flat: Tensor, bucket: Bucket) -> Stages:
        leaving = self._pack(sliced(flat, self._group.size))
        arriving, work = to_owners(self._group, leaving, bucket.place)
        yield work
        total = self._pack(added(self._unpack(arriving, flat.dtype))[None])
        totals = self._group.all_gather(total, bucket.place)
        return self._unpack(totals, flat.dtype).flatten()[: flat.numel()], None


def rounded(rows: Tensor) -> Tensor:
    return rows.to(torch.bfloat16)


def widened(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.to(dtype)


def scaled(rows: Tensor) -> Tensor:
    """Multiply each row by its own power of two, and append the exponent. Returns float16,
    [rows, length + 1].
    """
    largest = rows.abs().amax(dim=1, keepdim=True)
    exponent = torch.frexp(largest).exponent
    shift = torch.where(largest.isfinite(), _TOP - exponent, 0).clamp(max=_LARGEST_SHIFT)
    multiplied = rows * power_of_two(shift, rows.dtype)
    return torch.cat([multiplied, shift.to(rows.dtype)], dim=1).to(torch.float16)


def unscaled(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows[:, :-1].to(dtype) * power_of_two(-rows[:, -1:].to(torch.int32), dtype)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2 ** exponent exactly, from its bits: `pow` rounds."""
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


class Int8(Compressor):
    """Sends slices to their owners in 8 bits, adds them there in float32, and returns 8 bits.

    The largest of every 64 elements becomes 127 (or -127). The others are rounded to multiples of
    a 127th of it: this scale travels as a float32 behind the elements. Gradients begin at multiples
    of 64 in their bucket, so no parameter shares a scale with a larger one. Sums of such numbers do
    not fit 8 bits, so owners add in float32 and quantise the sum again. Both roundings are owed:
    the first by the rank whose gradient it is, the second by the owner of the slice.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def sum(self, flat: Tensor, bucket: Bucket) -> Stages:
        rows = sliced(flat, self._group.size, BLOCK)
        leaving = quantised(rows)
        left = flat - restored(leaving, flat.dtype).flatten()[: flat.numel()]
        arriving, work = to_owners(self._group, leaving, bucket.place)
        yield work
        total = added(restored(arriving, flat.dtype))
        packed = quantised(total[None])
        begin = self._group.rank * total.numel()
        owned = left[begin : begin + total.numel()]
        rounding = total - restored(packed, flat.dtype)[0]
        owned += rounding[: owned.numel()]
        totals = self._group.all_gather(packed, bucket.place)
        return restored(totals, flat.dtype).flatten()[: flat.numel()], left


def quantised(rows: Tensor) -> Tensor:
    """Quantise rows [rows, length] to int8, with the bytes of the scales behind them: [rows,
    length + 4 * length / BLOCK]. A nan or inf goes into its block's scale.
    """
    blocks = rows.reshape(rows.shape[0], -1, BLOCK)
    scales = (blocks.abs().amax(dim=2, keepdim=True) / _STEPS).to(torch.float32)
    usable = scales.isfinite() & (scales > 0)
    steps = torch.where(usable, blocks / scales, 0.0).round_().clamp_(-_STEPS, _STEPS)
    steps = steps.to(torch.int8)
    return torch.cat([steps.flatten(1), scales.flatten(1).view(torch.int8)], dim=1)


def restored(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows, [rows, length], that `quantised` has packed."""
    length = message.shape[1] * BLOCK // (BLOCK + 4)
    scales = message[:, length:].clone().view(torch.float32).to(dtype)
    steps = message[:, :length].to(dtype).view(message.shape[0], -1, BLOCK)
    return (steps * scales[:, :, None]).flatten(1)
