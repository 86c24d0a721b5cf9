"""Exercise 6: one gradient from micro-batches of different sizes, on all ranks.

Grade it with `pytest docs/course -k lesson6`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def global_gradient(model: nn.Module, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Set `.grad` to the gradient of the mean cross-entropy loss over all samples of all ranks.

    Every rank calls this, with an equal model. The process group is open. A rank may have no
    micro-batch. A gradient that is in the model before the call must not count. Each parameter
    travels once, however many micro-batches there are.

    Args:
        model: returns logits, [samples, classes].
        micro_batches: those of this rank, of any sizes: (inputs, labels).
    """
    raise NotImplementedError
