"""What ranks send each other in a step, and how long they wait for it, for each training method as
it is implemented.

    native                  the bucket, in a ring, as gloo does
    ring, tree, ...         the bucket, by that algorithm
    bf16, fp16, int8        slices to the ranks that own them, sums to all ranks; int8 with a
                            float32 for every 64 elements
    powersgd:r              P [n, r] of every matrix, with all vectors, then Q [m, r]; a matrix that
                            would not get smaller is sent uncompressed
    central                 one tensor after the other through rank 0

A message sent during the backward overlaps with the rest of it. As in the code, a bucket's second
message waits for the end of the backward, and so does a sum in shared memory or through rank 0.
Computation and link run in parallel, and each of them does one thing at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.collectives import Kind, Network
from lockstep.errors import UsageError
from lockstep.runs import Settings
from lockstep.tools.plan.carriers import Cost, cost
from lockstep.tools.plan.profile import GradientBucket

WIDTH = 4  # bytes of an element: float32
_INT8_BLOCK = 64  # elements that share a scale
_AT_THE_END = ("central", "shared_memory")


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of a bucket. `bytes`: size of the tensor that all ranks sum, or of the complete
    result that they gather.
    """

    kind: Kind
    algorithm: str
    bytes: float
    late: bool = False
    """Whether it is sent after the backward."""


def messages(method: Settings, bucket: GradientBucket, width: float) -> list[Message]:
    """Return the messages of one bucket, in the order in which they are sent."""
    compression = method.compression
    if compression is None:
        name = "ring" if method.reduce in ("auto", "native") else method.reduce
        late = name in _AT_THE_END
        shapes: Sequence[tuple[int, ...]] = [(bucket.elements,)]
        if name == "central" and bucket.tensors:
            shapes = bucket.tensors
        return [Message("all_reduce", name, width * math.prod(shape), late) for shape in shapes]
    if compression.rank is not None:
        if not bucket.tensors:
            raise UsageError("powersgd-needs-shapes", compress=str(compression))
        first, second = _factors(bucket.tensors, compression.rank)
        factors = [
            Message("all_reduce", "ring", WIDTH * first),
            Message("all_reduce", "ring", WIDTH * second, late=True),
        ]
        return [message for message in factors if message.bytes]
    width = 1 + 4 / _INT8_BLOCK if compression.kind == "int8" else 2
    sent = width * bucket.elements
    return [Message("all_to_all", "direct", sent), Message("all_gather", "ring", sent, late=True)]


def _factors(shapes: Sequence[tuple[int, ...]], rank: int) -> tuple[int, int]:
    """Return the elements of PowerSGD's first message (P, and what is sent uncompressed) and of its
    second (Q).
    """
    first = 0
    second = 0
    for shape in shapes:
        elements = math.prod(shape)
        sides = [size for size in shape if size != 1]
        if len(sides) > 1 and elements:
            rows = sides[0]
            columns = elements // rows
            if rank * (rows + columns) < elements:
                first += rank * rows
                second += rank * columns
                continue
        first += elements
    return first, second


@dataclass(frozen=True, slots=True)
class CommunicatingRanks:
    """Ranks that communicate, and the network between them."""

    workers: int
    network: Network
    software: float
    """Minimum seconds of a collective, on any network."""

    def cost(self, message: Message) -> Cost:
        return cost(self.network, message.kind, message.algorithm, self.workers)

    def small(self, bytes: float) -> float:
        """Return the seconds of an all-reduce of the library's own numbers, `bytes` in size."""
        by = ("ring", "recursive_doubling")
        return min(self.seconds([Message("all_reduce", name, bytes)]) for name in by)

    def seconds(self, messages: Iterable[Message]) -> float:
        """Return the seconds of these messages, one after the other."""
        seconds = 0.0
        for message in messages:
            price = self.cost(message)
            if message.bytes and price.rounds:
                seconds += max(self.software, price.latency) + message.bytes * price.per_byte
        return seconds

    def sent(self, messages: Iterable[Message]) -> float:
        """Return the bytes that the rank that sends most sends for these messages."""
        return sum(self.cost(message).sends * message.bytes for message in messages)
