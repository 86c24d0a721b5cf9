"""What ranks of this host take to sum gradients with each other: measured by the reduction that a training would have, and fitted to a line."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.gradients.bucket import Bucket
from lockstep.gradients.compression.choice import compressed
from lockstep.gradients.facts import numbers
from lockstep.gradients.layout import Entry, plan
from lockstep.gradients.reductions import Reduction, reduction
from lockstep.launcher.spawn import launch
from lockstep.measure.turns import take_turns
from lockstep.method import Method
from lockstep.plan.links.carriers import Cost, OneHost
from lockstep.plan.links.fit import Fit, fit
from lockstep.settings import Device
from lockstep.tuning.here import backend_of, kind_of_device
from lockstep.world import World, init

_TURNS = 15
_SMALLEST = 4096  # bytes
_SHARES = (1, 4, 16)  # of the largest bucket: a line needs several sizes, near those that will travel


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timed:
    """On so many ranks. Seconds: of a sum of so many bytes, and of a message that holds hardly any."""

    sums: Sequence[tuple[int, float]]
    small: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ThisHost:
    """What connects its ranks, and how sure it is."""

    network: OneHost
    error: float
    """By how much of itself a measured time lay beside the worst line."""
    words: str
    native: tuple[str, ...] = ("ring",)
    """Not asked for: sums were measured as they are made."""


def on_this_host(workers: Sequence[int], largest: int, method: Method, device: Device = "auto") -> ThisHost:
    """Of each of those numbers of ranks, for buckets of up to so many bytes. Its error is the worst line's. Raises WorkerFailed."""
    found: dict[int, Fit] = {}
    small: dict[int, float] = {}
    for ranks in workers:
        if ranks > 1:
            timed = launch(_on_rank, workers=ranks, args=(largest, method, device))[0]
            found[ranks] = fit([(1, bytes, seconds) for bytes, seconds in timed.sums])
            small[ranks] = timed.small
    sums = {ranks: Cost(line.first, line.second, 1, 2 * (ranks - 1) / ranks) for ranks, line in found.items()}
    beside = kind_of_device(device) == "cuda"
    told = "; ".join(f"{ranks} ranks {1e6 * line.first:.0f} us and {1e9 * line.second:.3g} ms a MB" for ranks, line in found.items())
    return ThisHost(
        network=OneHost(sums, small, beside),
        error=max((line.error for line in found.values()), default=0.0),
        words=f"this host: a sum of gradients takes {told}" if told else "this host: one rank sends nothing",
    )


def _on_rank(largest: int, method: Method, device: Device) -> _Timed:
    with init(backend=backend_of(device)) as world:
        group = world.group
        carrier = reduction(method.reduce, group) if method.compression is None else compressed(method.compression, group)
        buckets = _buckets(sorted({max(_SMALLEST, largest // share) for share in _SHARES}), carrier, world)
        ways: dict[str, Callable[[], object]] = {str(bucket.index): _sum(carrier, bucket) for bucket in buckets}
        note = torch.zeros(numbers(world.size), dtype=torch.float64, device=world.device)
        ways["small"] = lambda: group.all_reduce_small(note).wait()
        seconds = {name: statistics.median(each) for name, each in take_turns(ways, _TURNS, world).items()}
        sums = [(bucket.sum.numel() * bucket.sum.element_size(), seconds[str(bucket.index)]) for bucket in buckets]
        return _Timed(sums=sums, small=seconds["small"])


def _buckets(sizes: Sequence[int], carrier: Reduction, world: World) -> list[Bucket]:
    """One of each size, in bytes, of a matrix each."""
    parameters = [nn.Parameter(torch.zeros(max(1, size // 4 // 64), 64, device=world.device)) for size in sizes]
    entries = [Entry(str(number), each.numel(), each.dtype, each.device) for number, each in enumerate(parameters)]
    layout = plan(entries, range(len(entries)), bucket=1, first_bucket=1)
    memory = carrier.memory(layout)
    return [Bucket(bucket, parameters, room) for bucket, room in zip(layout.buckets, memory, strict=True)]


def _sum(carrier: Reduction, bucket: Bucket) -> Callable[[], object]:
    return lambda: carrier.start(bucket).wait()
