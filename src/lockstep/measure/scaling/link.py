"""The link between two ranks: latency and bandwidth, from all-reduces of a small and of a large tensor by what carries the gradients.

Two times give the two numbers of Hockney's model, taken that n ranks sum as a ring does: 2(n-1) messages one after the other, which bring
2(n-1)/n of the bytes through every link. Shared memory is no ring; the two numbers then stand for what its copies and meetings cost.
"""

from __future__ import annotations

import math
from statistics import median
from time import perf_counter

import torch

from lockstep.collectives.network import Link
from lockstep.gradients.exact.in_memory import ExactInMemory
from lockstep.gradients.reductions import Reduction, SharedMemory
from lockstep.measure.turns import settle
from lockstep.world import World

_SIZES = (2**12, 2**22)  # bytes: latency decides the first, bandwidth the second
_RUNS, _WARM_UP = 9, 2


def in_memory(reduction: Reduction) -> bool:
    """Whether gradients are summed where they lie, in memory that ranks share: after the backward, by the cores that computed it."""
    return isinstance(reduction, SharedMemory | ExactInMemory)


def link_of(world: World, reduction: Reduction) -> Link:
    """Measured by all ranks of a world of two or more; the same on all."""
    shared = world.group.memory if in_memory(reduction) else None
    carrier = world.group if shared is None else shared
    tensors = [torch.zeros(size // 4, device=world.device) for size in _SIZES]
    seconds: list[list[float]] = [[], []]
    for run in range(-_WARM_UP, _RUNS):
        for tensor, taken in zip(tensors, seconds, strict=True):
            world.control.all_reduce(torch.zeros(1)).wait()
            begin = perf_counter()
            carrier.all_reduce(tensor).wait()
            settle(world)
            if run >= 0:
                taken.append(perf_counter() - begin)
    medians = torch.tensor([median(taken) for taken in seconds], dtype=torch.float64)
    world.control.all_reduce(medians, "max").wait()
    small, large = medians.tolist()
    return fitted(world.size, small, large)


def fitted(workers: int, small: float, large: float) -> Link:
    """From the seconds of both sizes. Noise may make the large one quicker, or leave nothing for latency: then that one costs nothing."""
    passes, messages = 2 * (workers - 1) / workers, 2 * (workers - 1)
    more = _SIZES[1] - _SIZES[0]
    bandwidth = passes * more / (large - small) if large > small else math.inf
    return Link(max(0.0, (small - passes * _SIZES[0] / bandwidth) / messages), bandwidth)
