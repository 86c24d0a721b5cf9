"""Keyed randomness: a random stream belongs to what it is for, never to the rank or process that happens to draw from it.

    shared stream   (seed)                  initialisation: equal on all ranks
    step stream     (seed, step, slot)      dropout: belongs to the micro-batch
    sample stream   (seed, epoch, index)    augmentation: belongs to the sample

A stream is entered by seeding torch, numpy and `random` with a number derived from the key, so ordinary code draws from it. Adding
the rank to a seed instead makes collisions (seed 0 rank 1 = seed 1 rank 0) and ties the training to the number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

_MASK = 2**64 - 1
_SHARED, _STEP, _SAMPLE = 1, 2, 3


def derive(seed: int, *key: int) -> int:
    """64 bits from a seed and a key: equal for equal keys on every machine, unrelated for different ones.

    Each number is mixed in by splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
    """
    state = _mix(seed & _MASK)
    for number in key:
        state = _mix(state ^ _mix((number + 0x9E3779B97F4A7C15) & _MASK))
    return state


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def seed_all(value: int) -> None:
    """Seed torch (its GPUs too), numpy's global generator and `random`."""
    import numpy as np
    import torch

    torch.manual_seed(value & _MASK)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def shared(seed: int) -> None:
    """Enter the shared stream: what is drawn next is equal on all ranks."""
    seed_all(derive(seed, _SHARED))


def step(seed: int, step: int, slot: int) -> None:
    """Enter the stream of one micro-batch."""
    seed_all(derive(seed, _STEP, step, slot))


def sample(seed: int, epoch: int, index: int) -> None:
    """Enter the stream of one sample in one epoch."""
    seed_all(derive(seed, _SAMPLE, epoch, index))


@contextmanager
def preserved() -> Iterator[None]:
    """Put the CPU states of torch, numpy and `random` back after the block."""
    import numpy as np
    import torch

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
