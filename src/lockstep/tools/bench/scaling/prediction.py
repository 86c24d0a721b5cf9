"""What efficiency is to be expected, from one rank's work measured alone and the link between
ranks: no step that it is compared with goes in.

What the fullest of n ranks computes is measured on one rank alone, with its share of the batch and
its threads; where there are more threads than cores it takes so many times longer. What ranks then
say to each other, and what of it is hidden, is simulated (tools/plan/simulate.py).

What ranks take from each other otherwise, memory bandwidth, caches and a processor's clock, and how
long they wait for a slow one, is in no term: where measured and predicted part, that is the
finding.

The link's latency and bandwidth come from all-reduces of a small and of a large tensor by what
carries the gradients, taken that n ranks sum as a ring does: 2(n-1) messages one after the other,
which bring 2(n-1)/n of the bytes through every link. Shared memory is no ring; the two numbers then
stand for what its copies and meetings cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.collectives.network import Link, Network
from lockstep.collectives.work import Work
from lockstep.config.parallelism import Parallelism
from lockstep.gradients.exact import ExactInMemory
from lockstep.gradients.facts import numbers
from lockstep.gradients.reductions import Reduction, SharedMemory
from lockstep.tools.plan.carriers import Cost, OneHost
from lockstep.tools.plan.simulate import simulate
from lockstep.tools.plan.work import BACKWARD, RankWork
from lockstep.tools.timing.hockney import Fit, measured
from lockstep.tools.timing.profile import Leaves, leaves
from lockstep.training.loop import Training
from lockstep.world.world import World

_SIZES = (2**12, 2**22)  # bytes: latency decides the first, bandwidth the second


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What ranks send each other in a step, and over what."""

    buckets: Sequence[Leaves]
    """Of gradients, in the order in which they leave."""
    width: int
    """Bytes of an element of a gradient."""
    buffers: int
    """Bytes that ranks average after every step: BatchNorm's statistics."""
    overlaps: bool
    """Whether gradients can travel while the backward goes on: not in shared memory."""
    reduction: str = ""
    """Its name."""
    link: Link | None = None
    """Between two ranks; None where it was not measured: every world has one rank, and nothing
    is sent.
    """


def carried(training: Training, link: Link | None) -> Carried:
    """By the ranks of a training."""
    reducer = training.stepper.reducer
    return Carried(
        buckets=leaves([bucket.parameters for bucket in reducer.buckets]),
        width=max(each.element_size() for each in reducer.parameters),
        buffers=sum(each.nbytes for each in training.model.buffers() if each.is_floating_point()),
        overlaps=not in_memory(reducer.reduction),
        reduction=reducer.reduction.name,
        link=link,
    )


def in_memory(reduction: Reduction) -> bool:
    """Whether gradients are summed where they lie, in memory that ranks share: after the
    backward, by the cores that computed it.
    """
    return isinstance(reduction, SharedMemory | ExactInMemory)


def link_of(world: World, reduction: Reduction) -> Link:
    """Measured by all ranks of a world of two or more; the same on all."""
    shared = world.group.memory if in_memory(reduction) else None
    of_backend = world.group.backend_all_reduce
    reduce: Callable[[Tensor], Work] = of_backend if shared is None else shared.all_reduce
    tensors = [torch.zeros(size // 4, device=world.device) for size in _SIZES]
    return link_in(
        measured({each.nbytes: partial(_sum, reduce, each) for each in tensors}, world), world.size
    )


def _sum(reduce: Callable[[Tensor], Work], tensor: Tensor) -> None:
    reduce(tensor).wait()


def link_in(line: Fit, workers: int) -> Link:
    """Of a ring that takes so long for an all-reduce. Noise may leave nothing for latency, or
    for bandwidth: then that one costs nothing.
    """
    return Link(
        line.first / (2 * (workers - 1)),
        2 * (workers - 1) / workers / line.second if line.second else math.inf,
    )


def step_seconds(
    known: Carried,
    method: Parallelism,
    *,
    workers: int,
    alone: float,
    micro_batches: int,
    threads: int,
    cores: int | None,
) -> float:
    """Of a step of so many workers. `alone`: seconds of what the fullest of them computes, by
    one rank alone; `cores`: None on GPUs.
    """
    crowded = 1.0 if cores is None else max(1.0, workers * threads / cores)
    if workers == 1 or known.link is None:
        return alone * crowded
    each = alone * crowded / micro_batches
    work = RankWork(
        forward=(1 - BACKWARD) * each,
        backward=BACKWARD * each,
        micro_batches=micro_batches,
        buckets=known.buckets,
        width=known.width,
        facts=8 * numbers(workers),
        buffers=known.buffers,
    )
    network = (
        Network.flat(known.link.latency, known.link.bandwidth)
        if known.overlaps
        else _shared_memory(known.link, workers)
    )
    return simulate(work, workers, network, method).step


def _shared_memory(link: Link, workers: int) -> OneHost:
    """What the copies and meetings of so many ranks cost, if they cost what those of a ring over
    this link would.
    """
    messages, passes = 2 * (workers - 1), 2 * (workers - 1) / workers
    latency = messages * link.latency
    return OneHost(
        {workers: Cost(latency, passes / link.bandwidth, messages, passes)}, {workers: latency}
    )
