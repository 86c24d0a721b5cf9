"""The norm of all gradients, as one process would see it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.gradients.bucket import Bucket


def gradient_norm(buckets: Sequence[Bucket]) -> Tensor:
    """The Euclidean norm over all elements of all buckets (the gaps between gradients are zeros), accumulated in float32 or wider.

    float64, 0-d, on the device of the first bucket: nobody waits for it here.
    """
    device = buckets[0].sum.device
    norms = [torch.linalg.vector_norm(bucket.sum, dtype=torch.promote_types(bucket.sum.dtype, torch.float32)) for bucket in buckets]
    whole: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, torch.float64) for norm in norms]))
    return whole
