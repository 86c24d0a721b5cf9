"""Solution 10: the clock of a pipeline, and two layers whose matrices are split."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def clock(stages: int, micro_batches: int) -> list[list[tuple[int, int]]]:
    """Return what a pipeline computes at each tick of its forward passes.

    Each entry is the list of (stage, micro-batch) that run at that tick, in the order of stages. A
    stage computes one micro-batch at a tick, and the micro-batches in order. It can begin with one
    when the stage before has finished it at an earlier tick. Nothing waits longer than it must.
    """
    return [
        [
            (stage, tick - stage)  # micro-batch m reaches stage s at tick m + s
            for stage in range(stages)
            if 0 <= tick - stage < micro_batches
        ]
        for tick in range(micro_batches + stages - 1)
    ]


def split_mlp(inputs: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return `relu(inputs @ first) @ second` on every rank, from the parts of the matrices.

    Every rank calls this. The process group is open. Communicate once, and only a tensor of the
    size of the result.

    Args:
        inputs: [samples, width], the same on all ranks.
        first: [width, hidden / ranks], this rank's columns of the first matrix.
        second: [hidden / ranks, outputs], this rank's rows of the second matrix.
    """
    partial = torch.relu(inputs @ first) @ second
    dist.all_reduce(partial)
    return partial
