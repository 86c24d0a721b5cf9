"""What a method sends in a step, and how long the step takes: pure functions of sizes.

    S   bytes of all gradients        W   ranks, each with a link of its own that sends and receives at once
    a   latency of a message          b   seconds per byte

    native, ring            every rank sends 2(W-1)/W S, in 2(W-1) messages one after the other, for every bucket
    bf16, fp16, int8        the same in smaller numbers: slices to their owners, sums to everybody; int8 with a float32 for every 64 elements
    powersgd:r              rings of P [n, r] with all vectors, and of Q [m, r]; a matrix that would not get smaller travels whole
    topk:s                  every rank sends 8 bytes for each of its s S/4 largest elements to every other one: grows with W
    local steps             a ring of the parameters every H steps
    server                  every rank owns S/W: gradients go to the owners, parameters come back; 2(W-1)/W S
    central                 rank 0 receives and sends (W-1) S, one tensor of one rank after the other

A step takes its computation and what of the communication is not hidden behind it. What leaves during the backward of the last micro-batch is hidden
behind that backward, but for the last bucket, which leaves when nothing is left to compute. Compressing itself is taken to cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from lockstep.collectives.algorithms import schedule
from lockstep.collectives.network import Link, Network
from lockstep.collectives.schedule import Schedule
from lockstep.gradients.layout import ALIGNMENT
from lockstep.method import Compression, Method, Reduce

WIDTH = 4  # bytes of an element: float32
INT8_BLOCK = ALIGNMENT  # elements that share a scale
BACKWARD = 2 / 3  # of a micro-batch's time
_BY_SCHEDULE = ("tree", "halving_doubling")


@dataclass(frozen=True, slots=True)
class Gradients:
    """The parameters that are trained."""

    shapes: Sequence[tuple[int, ...]]
    buckets: Sequence[int]
    """Elements of each bucket, in the order in which they leave."""

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def bytes(self) -> int:
        return WIDTH * self.elements

    @property
    def last(self) -> float:
        """The share of the bucket that leaves last."""
        return self.buckets[-1] / sum(self.buckets)


@dataclass(frozen=True, slots=True)
class Computation:
    """Of one rank in one step, in seconds."""

    step: float
    behind: float
    """The part of it behind which gradients can travel: the backward of its last micro-batch."""

    @classmethod
    def of(cls, step: float, micro_batches: int) -> Computation:
        return cls(step, BACKWARD * step / micro_batches)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one step; where ranks meet every H steps, an H-th of a meeting."""

    sends: float
    """Bytes, by the rank that sends most."""
    passes: float
    """Bytes that go through the busiest link one after the other."""
    rounds: float
    """Messages that wait for each other."""
    early: float = 1.0
    """The share of it that leaves during the backward."""


def traffic(method: Method, gradients: Gradients, workers: int) -> Traffic:
    """What a method sends. A rank alone sends nothing."""
    if workers == 1:
        return Traffic(0, 0, 0)
    if method.server is not None:
        return _of_server(gradients.bytes, workers, method.server.shards or workers)
    if method.local is not None:
        met = _summed(method.compression, gradients, workers)
        every = method.sync_every or 1
        return Traffic(met.sends / every, met.passes / every, met.rounds / every, 0.0)
    if method.reduce == "central":
        rounds = 2 * (workers - 1) * len(gradients.shapes)
        return Traffic((workers - 1) * gradients.bytes, 2 * (workers - 1) * gradients.bytes, rounds, 0.0)
    if method.reduce in _BY_SCHEDULE:
        return _by_schedule(schedule("all_reduce", method.reduce, workers), gradients)
    assert method.reduce in get_args(Reduce)
    return _summed(method.compression, gradients, workers)


def seconds(method: Method, found: Traffic, gradients: Gradients, link: Link, computation: Computation) -> float:
    """How long a step takes, on the mean."""
    whole = found.rounds * link.latency + found.passes / link.bandwidth
    if method.server is not None:  # with any staleness a rank computes on while its gradients travel
        return computation.step + whole if method.bound == 0 else max(computation.step, whole)
    if method.local is not None:
        every = method.sync_every or 1
        return computation.step + max(0.0, whole * every - method.local.overlap * computation.step) / every
    early = found.early * whole
    return computation.step + (whole - early) + max(gradients.last * early, early - computation.behind)


def _summed(compression: Compression | None, gradients: Gradients, workers: int) -> Traffic:
    """All buckets, by rings or what sends as much."""
    share, rounds = (workers - 1) / workers, workers - 1
    buckets = len(gradients.buckets)
    if compression is None:
        return Traffic(2 * share * gradients.bytes, 2 * share * gradients.bytes, 2 * rounds * buckets)
    if compression.kind == "topk":
        assert compression.amount is not None
        chosen = (workers - 1) * math.ceil(compression.amount * gradients.elements) * (WIDTH + 4)
        return Traffic(chosen, chosen, rounds * buckets)
    if compression.kind == "powersgd":
        assert compression.amount is not None
        first, second = _factors(gradients.shapes, int(compression.amount))
        factors = 2 * share * WIDTH * (first + second)
        return Traffic(factors, factors, 4 * rounds * buckets, first / (first + second))
    each = 2 if compression.kind in ("bf16", "fp16") else 1 + 4 / INT8_BLOCK
    sent = 2 * share * each * gradients.elements
    return Traffic(sent, sent, 2 * rounds * buckets, 0.5)  # slices leave in the backward, sums after it


def _factors(shapes: Sequence[tuple[int, ...]], rank: int) -> tuple[int, int]:
    """Elements of PowerSGD's first message (P, and what travels whole) and of its second (Q)."""
    first = second = 0
    for shape in shapes:
        sides = [size for size in shape if size != 1]
        elements = math.prod(shape)
        rows = sides[0] if len(sides) > 1 else elements
        columns = elements // rows if rows else 0
        if len(sides) > 1 and rank * (rows + columns) < elements:
            first, second = first + rank * rows, second + rank * columns
        else:
            first += elements
    return first, second


def _of_server(bytes: int, workers: int, shards: int) -> Traffic:
    """The first `shards` ranks own an equal part each; an owner's own gradients and parameters stay where they are."""
    owners = min(shards, workers)
    owned = bytes / owners
    pushed_by_owner, pulled_from_owner = bytes - owned, (workers - 1) * owned
    of_owner = pushed_by_owner + pulled_from_owner
    others = bytes if owners < workers else 0.0
    return Traffic(max(of_owner, others), max(of_owner, others), 2)


def _by_schedule(of: Schedule, gradients: Gradients) -> Traffic:
    """One of our own, walked on a network on which a byte takes a second, and on one on which a message does."""
    cell = gradients.bytes / of.cells
    sends = [0.0] * of.world
    for each in of.rounds:
        for source, count in zip(each.src.tolist(), each.count.tolist(), strict=True):
            sends[source] += each.repeat * count * cell
    passes = Network.flat(0.0, 1.0).time(of, gradients.bytes)
    rounds = sum(each.repeat for each in of.rounds)
    return Traffic(max(sends), passes, rounds * len(gradients.buckets))
