"""Solution 6: one gradient from micro-batches of different sizes, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


def global_gradient(model: nn.Module, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Set `.grad` to the gradient of the mean cross-entropy loss over all samples of all ranks.

    Every rank calls this, with an equal model. The process group is open. A rank may have no
    micro-batch. A gradient that is in the model before the call must not count. Each parameter
    travels once, however many micro-batches there are.

    Args:
        model: returns logits, [samples, classes].
        micro_batches: those of this rank, of any sizes: (inputs, labels).
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # a rank without samples adds zeros
    weight = torch.zeros(())
    for inputs, labels in micro_batches:
        F.cross_entropy(model(inputs), labels, reduction="sum").backward()
        weight += len(labels)
    dist.all_reduce(weight)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # all_reduce adds by default
        parameter.grad /= weight
