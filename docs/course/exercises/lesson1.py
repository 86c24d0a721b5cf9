"""Exercise 1: the gradient of a batch, computed in parts.

Grade it with `pytest docs/course -k lesson1`.
"""

from __future__ import annotations

from torch import Tensor, nn


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
    raise NotImplementedError
