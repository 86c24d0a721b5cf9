"""Solution 5: average the gradients of all ranks, with one all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def average_gradients(
    parameters: Sequence[nn.Parameter], weight: int, all_reduce: Callable[[Tensor], None]
) -> None:
    """Replace each `.grad` by the gradient of the mean loss over the samples of all ranks.

    Before the call `.grad` is the gradient of the *sum* of this rank's losses. It is None if this
    rank did not use the parameter. Ranks have different numbers of samples, and some have none.
    After the call every parameter has a gradient on every rank; zeros, if no rank used it.

    Call `all_reduce` exactly once. So put everything into one flat tensor, a bucket.

    Args:
        parameters: of the model, in the same order on all ranks.
        weight: how many samples this rank has. All ranks together have at least 1.
        all_reduce: replaces a tensor by the sum of all ranks' tensors.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    # the weights must be added up too: they travel at the end of the bucket
    bucket = torch.cat([*(each.flatten() for each in gradients), torch.tensor([float(weight)])])
    all_reduce(bucket)
    *parts, total = bucket.split([*(each.numel() for each in gradients), 1])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = (part / total).view_as(parameter)
