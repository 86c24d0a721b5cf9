"""Exercise 4: a distributed sampler in one function.

Grade it with `pytest docs/course -k lesson4`.
"""

from __future__ import annotations


def rank_indices(
    samples: int, rank: int, size: int, *, seed: int, epoch: int, drop_last: bool = False
) -> list[int]:
    """Return the indices of the samples that this rank uses in this epoch.

    - All ranks get equally many. If `samples` is not a multiple of `size`, the order is repeated
      from its start until it is. With `drop_last` its end is left out instead.
    - Apart from the padding no two ranks get the same sample, and together they get all samples.
    - The order is a permutation that depends on seed and epoch, and on nothing else. Seed 0 in
      epoch 1 must not have the same order as seed 1 in epoch 0.

    Args:
        samples: how many samples the data set has, at least 1. May be less than `size`.
        rank: the number of this rank.
        size: the number of ranks.
        seed: equal on all ranks.
        epoch: the number of the epoch, from 0.
        drop_last: leave samples out instead of repeating them.
    """
    raise NotImplementedError
