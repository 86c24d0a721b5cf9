"""The norm of all gradients, as one process would see it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.gradients.bucket import Bucket


def gradient_norm(buckets: Sequence[Bucket]) -> float:
    """The Euclidean norm over all elements of all buckets (the gaps between gradients are zeros), accumulated in float32 or wider."""
    norms = [
        torch.linalg.vector_norm(bucket.sum, dtype=torch.promote_types(bucket.sum.dtype, torch.float32)).double().cpu()
        for bucket in buckets
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
