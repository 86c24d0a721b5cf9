"""Exercise 9: gradients with few elements, and steps without communication.

Grade it with `pytest docs/course -k lesson9`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class TopK:
    """Compresses the gradients of one rank to their largest elements, with error feedback.

    Args:
        share: which part of the elements is sent, at least one.
    """

    def __init__(self, share: float) -> None:
        raise NotImplementedError

    def compress(self, gradient: Tensor) -> Tensor:
        """Return what this rank sends: a tensor of the same shape that is 0 but for the largest
        elements.

        There are `int(share * gradient.numel())` of them, at least one. What was not sent in
        earlier calls is added to `gradient` first; `gradient` itself does not change. After any
        number of calls, the sum of all results and what is still owed is the sum of all gradients.
        """
        raise NotImplementedError


def local_steps(
    weights: Tensor, gradient: Callable[[Tensor], Tensor], steps: int, every: int, lr: float
) -> Tensor:
    """Take steps of plain gradient descent alone, and average the weights over all ranks after
    every `every` steps and after the last one.

    Every rank calls this, with equal weights. The process group is open. Communicate no more often
    than that.

    Args:
        weights: where training starts. They do not change.
        gradient: weights -> the gradient on this rank's samples, which may draw new samples.
        steps: how many steps each rank takes, at least 1.
        every: steps between two averages.
        lr: the learning rate.

    Returns:
        The weights after the last average, equal on all ranks.
    """
    raise NotImplementedError
