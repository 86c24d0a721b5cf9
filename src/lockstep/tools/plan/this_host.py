"""Measures how fast ranks of this host sum gradients, for a plan with `--network here`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from lockstep.config.parallelism import Parallelism
from lockstep.config.settings import Device
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.compression import compressed
from lockstep.gradients.facts import numbers
from lockstep.gradients.layout import Entry, plan
from lockstep.gradients.reductions import Reduction, reduction
from lockstep.launcher.launch import launch
from lockstep.tools.plan.carriers import Cost, OneHost
from lockstep.tools.plan.networks import PlanNetwork
from lockstep.tools.timing.hockney import Fit, measured
from lockstep.tools.timing.in_turns import take_turns
from lockstep.tools.timing.machine import kind_of_device
from lockstep.training.opening import backend_of
from lockstep.world.world import World, init

_SMALLEST = 4096  # bytes
# parts of the largest bucket: a fit needs several sizes, near those that a training sends
_SHARES = (1, 4, 16)


def on_this_host(
    workers: Sequence[int], largest: int, method: Parallelism, device: Device = "auto"
) -> PlanNetwork:
    """Measure how ranks of this host sum gradients, with the reduction that a training would use,
    for each number of ranks in `workers` and buckets of up to `largest` bytes.

    `error` of the result is that of the worst fit. Raises WorkerFailed.
    """
    found: dict[int, tuple[Fit, float]] = {
        ranks: launch(_on_rank, workers=ranks, args=(largest, method, device))[0]
        for ranks in workers
        if ranks > 1
    }
    sums = {
        ranks: Cost(line.first, line.second, 1, 2 * (ranks - 1) / ranks)
        for ranks, (line, _) in found.items()
    }
    small = {ranks: seconds for ranks, (_, seconds) in found.items()}
    told = "; ".join(
        f"{ranks} ranks {1e6 * line.first:.0f} us and {1e9 * line.second:.3g} ms a MB"
        for ranks, (line, _) in found.items()
    )
    return PlanNetwork(
        network=OneHost(sums, small, beside=kind_of_device(device) == "cuda"),
        error=max((line.error for line, _ in found.values()), default=0.0),
        words=(
            f"this host: a sum of gradients takes {told}"
            if told
            else "this host: one rank sends nothing"
        ),
    )


def _on_rank(largest: int, method: Parallelism, device: Device) -> tuple[Fit, float]:
    """Return the fit for a sum of gradients, and the seconds of a message of a few numbers."""
    with init(backend=backend_of(device)) as world:
        group = world.group
        carrier = (
            reduction(method.reduce, group)
            if method.compression is None
            else compressed(method.compression, group)
        )
        buckets = _buckets(
            sorted({max(_SMALLEST, largest // share) for share in _SHARES}), carrier, world
        )
        line = measured(
            {bucket.sum.nbytes: partial(_sum, carrier, bucket) for bucket in buckets}, world
        )
        note = torch.zeros(numbers(world.size), dtype=torch.float64, device=world.device)
        small = take_turns({"small": lambda: group.all_reduce(note).wait()}, 15, world)["small"]
        return line, statistics.median(small)


def _buckets(sizes: Sequence[int], carrier: Reduction, world: World) -> list[Bucket]:
    """Return a bucket for each size in bytes; each holds one matrix."""
    parameters = [
        nn.Parameter(torch.zeros(max(1, size // 4 // 64), 64, device=world.device))
        for size in sizes
    ]
    entries = [
        Entry(str(number), each.numel(), each.dtype, each.device)
        for number, each in enumerate(parameters)
    ]
    layout = plan(entries, range(len(entries)), bucket=1, first_bucket=1)
    return [
        Bucket(bucket, parameters, room)
        for bucket, room in zip(layout.buckets, carrier.memory(layout), strict=True)
    ]


def _sum(carrier: Reduction, bucket: Bucket) -> None:
    carrier.start(bucket).wait()
