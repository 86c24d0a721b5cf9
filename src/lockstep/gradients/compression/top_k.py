"""Only the largest elements of a bucket travel, each with its place; the others wait until they have grown (Stich et al., NeurIPS 2018).

Ranks choose different ones, so nothing can be added on the way: every rank gets every message, and adds them in the order of ranks.
What that costs grows with the number of ranks, unlike all the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.compression.carry import to_all
from lockstep.gradients.compression.reduction import Stages


class TopK:
    """`share` of the elements of each bucket, by magnitude, in the gradients' own dtype."""

    owes = True

    def __init__(self, group: Group, share: float) -> None:
        self._group = group
        self._share = share

    def sum(self, flat: Tensor, bucket: Bucket) -> Stages:
        count = max(1, math.ceil(self._share * sum(span.stop - span.start for span in bucket.spans)))
        places = flat.abs().topk(count, sorted=False).indices
        values = flat[places].to(bucket.sum.dtype)
        left = flat.clone()
        left[places] -= values.to(flat.dtype)  # all of it, but for what a narrower dtype rounds
        width = torch.int32 if flat.numel() < 2**31 else torch.int64
        message = torch.cat([places.to(width).view(torch.uint8), values.view(torch.uint8)])
        arriving, work = to_all(self._group, message, bucket.place)
        yield work
        total = torch.zeros_like(flat)
        for theirs in arriving:
            where, what = theirs.split([count * width.itemsize, count * values.itemsize])
            total.index_add_(0, where.clone().view(width), what.clone().view(values.dtype).to(flat.dtype))
        return total, left

    def kept(self) -> Mapping[str, Tensor]:
        return {}

    def take_back(self, common: Mapping[str, Tensor]) -> None:
        pass
