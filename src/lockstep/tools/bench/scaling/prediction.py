"""Predicts efficiency from one rank's work, measured alone, and the link between ranks. Measured
steps of several ranks are not used.

The work of the rank with the most micro-batches is measured on one rank alone, with its share of
the batch and its threads. With more threads than cores, its time grows in proportion. Communication
and its overlap are simulated (tools/plan/simulate.py).

The prediction ignores that ranks share memory bandwidth, caches and the processor's clock, and that
they wait for a slow rank. So a difference between measurement and prediction shows these effects.

The link's latency and bandwidth come from all-reduces of a small and a large tensor, with the
reduction of the gradients. They assume that n ranks sum in a ring: 2(n-1) messages one after the
other, which send 2(n-1)/n of the bytes over every link. Shared memory is no ring: the two numbers
then model the cost of its copies and barriers.
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

_SIZES = (2**12, 2**22)  # bytes: the first depends mostly on latency, the second on bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What ranks send each other in a step, and the link that they use."""

    buckets: Sequence[Leaves]
    """Buckets of gradients, in the order in which they leave."""
    width: int
    """Bytes per element of a gradient; the largest if they differ."""
    buffers: int
    """Bytes that ranks average after every step: BatchNorm's statistics."""
    overlaps: bool
    """Whether gradients can be sent during the backward: not in shared memory."""
    reduction: str = ""
    """Name of the reduction."""
    link: Link | None = None
    """Link between two ranks; None if it was not measured because every world has one rank."""


def carried(training: Training, link: Link | None) -> Carried:
    """Return what the ranks of a training send each other."""
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
    """Whether gradients are summed in shared memory: after the backward, by the cores that computed
    it.
    """
    return isinstance(reduction, SharedMemory | ExactInMemory)


def link_of(world: World, reduction: Reduction) -> Link:
    """Measure the link. All ranks of a world of two or more call it, and get the same result."""
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
    """Return the link of a ring whose all-reduces have these times. With noise, the fit may find no
    latency or no cost per byte: the link then has latency 0 or infinite bandwidth.
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
    """Predict the seconds of a step of `workers` ranks. `alone`: seconds that the work of the rank
    with the most micro-batches takes on one rank alone; `cores`: None on GPUs.
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
    """Return the cost of a sum in shared memory, as that of a ring over this link."""
    messages, passes = 2 * (workers - 1), 2 * (workers - 1) / workers
    latency = messages * link.latency
    return OneHost(
        {workers: Cost(latency, passes / link.bandwidth, messages, passes)}, {workers: latency}
    )
