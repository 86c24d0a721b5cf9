"""Solution 1: the gradient of a batch, computed in parts."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def gradient_in_parts(
    model: nn.Module, inputs: Tensor, labels: Tensor, micro_batch: int
) -> list[Tensor]:
    """Return the gradient of the mean cross-entropy loss over all samples.

    The model must never see more than `micro_batch` samples in one forward pass. The last
    micro-batch may have fewer. A gradient that is in the model before the call must not count.

    Args:
        model: returns logits, [samples, classes].
        inputs: [samples, ...]. All samples of the batch.
        labels: [samples]. The class of each sample.
        micro_batch: at most this many samples in one forward pass.

    Returns:
        One gradient for each parameter, in the order of `model.parameters()`.
    """
    model.zero_grad()
    for x, y in zip(inputs.split(micro_batch), labels.split(micro_batch), strict=True):
        # backward adds to .grad: the sum of the losses gives the sum of the gradients
        F.cross_entropy(model(x), y, reduction="sum").backward()
    return [parameter.grad / len(inputs) for parameter in model.parameters()]
