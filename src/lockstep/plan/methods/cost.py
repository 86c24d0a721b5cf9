"""What a method sends in a step, and how long the step takes, where nothing is known of a model but its sizes.

    S   bytes of all gradients        W   ranks, each with a link of its own that sends and receives at once
    a   latency of a message          b   seconds per byte

    native, ring            every rank sends 2(W-1)/W S, in 2(W-1) messages one after the other, for every bucket
    bf16, fp16, int8        the same in smaller numbers: slices to their owners, sums to everybody; int8 with a float32 for every 64 elements
    powersgd:r              rings of P [n, r] with all vectors, and of Q [m, r]; a matrix that would not get smaller travels whole
    topk:s                  every rank sends 8 bytes for each of its s S/4 largest elements to every other one: grows with W
    local steps             a ring of the parameters every H steps
    server                  every rank owns S/W: gradients go to the owners, parameters come back; 2(W-1)/W S
    central                 rank 0 receives and sends (W-1) S, one tensor of one rank after the other

It is the step of simulate.py, with nothing measured: the backward is two thirds of a micro-batch, a bucket is complete when the backward has come
through as large a share of the elements, all ranks are alike, and compressing costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lockstep.collectives.network import Link, Network
from lockstep.method import Method
from lockstep.plan.simulation.simulate import simulate
from lockstep.plan.simulation.work import WIDTH, Leaves, Work

BACKWARD = 2 / 3  # of a micro-batch's time: products for the inputs' gradients and for the weights', where a forward has one


@dataclass(frozen=True, slots=True)
class Gradients:
    """The parameters that are trained."""

    shapes: Sequence[tuple[int, ...]]
    buckets: Sequence[int]
    """Elements of each bucket, in the order in which they leave. They hold the shapes from the last to the first."""
    width: float = WIDTH
    """Bytes of an element."""

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def bytes(self) -> float:
        return self.width * self.elements

    def leaves(self) -> tuple[Leaves, ...]:
        """Each bucket, complete after as large a share of the backward as it, and those before it, have of the elements."""
        total, waiting = sum(self.buckets), list(self.shapes)
        found = []
        for elements, so_far in zip(self.buckets, accumulate(self.buckets), strict=True):
            tensors, held = [], 0
            while waiting and (held < elements or not elements):
                tensors.append(waiting.pop())
                held += math.prod(tensors[-1])
            found.append(Leaves(ready=so_far / total, elements=elements, tensors=tuple(tensors)))
        assert not waiting, "the buckets hold all of the shapes"
        return tuple(found)


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


def traffic(method: Method, gradients: Gradients, workers: int) -> Traffic:
    """What a method sends, on a network on which a byte takes a second, and on one on which a message does. A rank alone sends nothing."""
    work = _work(gradients, Computation(0.0, 0.0))
    bytes = simulate(work, workers, Network.flat(0.0, 1.0), method)
    return Traffic(bytes.sent, bytes.communication, simulate(work, workers, Network.flat(1.0, math.inf), method).communication)


def seconds(method: Method, gradients: Gradients, workers: int, link: Link, computation: Computation) -> float:
    """How long a step takes, on the mean."""
    return simulate(_work(gradients, computation), workers, Network.flat(link.latency, link.bandwidth), method).step


def _work(gradients: Gradients, computation: Computation) -> Work:
    forward = computation.step - computation.behind
    return Work(forward=forward, backward=computation.behind, micro_batches=1, buckets=gradients.leaves(), width=gradients.width)
