"""Exercise 7: speedup and efficiency, and what a step takes.

Grade it with `pytest docs/course -k lesson7`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def scaling(rates: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Return (speedup, efficiency) for each number of workers.

    The smallest number of workers is the base. It need not be 1. The base has speedup 1 and
    efficiency 1. With linear scaling every number of workers has efficiency 1.

    Args:
        rates: samples per second by number of workers.
    """
    raise NotImplementedError


def ring_seconds(ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce.

    Args:
        ranks: how many ranks there are, at least 1.
        size: bytes of the tensor on each rank.
        latency: seconds for a message, whatever its size.
        bandwidth: bytes per second, one way.
    """
    raise NotImplementedError


def step_seconds(forward: float, backward: float, buckets: Sequence[float]) -> float:
    """Return the seconds from the start of the forward pass until all gradients are summed.

    The backward pass completes its buckets one after the other, at equal distances, the last one at
    its end. The link carries one bucket at a time, in this order, each as soon as it is complete
    and the link is free.

    Args:
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        buckets: seconds on the link of each bucket, in the order in which they are complete.
    """
    raise NotImplementedError
