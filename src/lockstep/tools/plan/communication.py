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
from typing import Literal

from lockstep.config.parallelism import Compression, Parallelism
from lockstep.errors import UsageError
from lockstep.gradients.layout import ALIGNMENT
from lockstep.schedules.network import Network
from lockstep.schedules.schedule import Kind
from lockstep.tools.plan.carriers import Cost, cost
from lockstep.tools.plan.work import WIDTH, RankWork
from lockstep.tools.timing.profile import Leaves

INT8_BLOCK = ALIGNMENT  # elements that share a scale
_AT_THE_END = ("central", "shared_memory")


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of a bucket. `bytes`: size of the tensor that all ranks sum, or of the complete
    result that they gather.
    """

    kind: Kind
    algorithm: Literal[
        "native",
        "central",
        "ring",
        "tree",
        "halving_doubling",
        "hierarchical",
        "direct",
        "shared_memory",
    ]
    bytes: float
    late: bool = False
    """Whether it is sent after the backward."""


def messages(method: Parallelism, bucket: Leaves, width: float, workers: int) -> list[Message]:
    """Return the messages of one bucket, in the order in which they are sent."""
    if method.compression is not None:
        return _compressed(method.compression, bucket, workers)
    name = "native" if method.reduce in ("auto", "native") else method.reduce
    late = name in _AT_THE_END
    if name == "central":
        shapes = bucket.tensors or ((bucket.elements,),)
        return [Message("all_reduce", name, width * math.prod(shape), late) for shape in shapes]
    return [Message("all_reduce", name, width * bucket.elements, late)]  # type: ignore[arg-type]  # Parallelism has refused other names


def _compressed(compression: Compression, bucket: Leaves, workers: int) -> list[Message]:
    if compression.rank is not None:
        if not bucket.tensors:
            raise UsageError("powersgd-needs-shapes", compress=str(compression))
        first, second = _factors(bucket.tensors, compression.rank)
        factors = [
            Message("all_reduce", "native", WIDTH * first),
            Message("all_reduce", "native", WIDTH * second, late=True),
        ]
        return [message for message in factors if message.bytes]
    width = 1 + 4 / INT8_BLOCK if compression.kind == "int8" else 2
    sent = width * bucket.elements
    return [Message("all_to_all", "direct", sent), Message("all_gather", "native", sent, late=True)]


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
class QueuedBucket:
    """The seconds for which a bucket of gradients uses the link."""

    ready: float
    """The share of the last backward after which the bucket can be sent."""
    early: float
    """Seconds of the messages that can be sent during the backward."""
    late: float
    """Seconds of the messages that wait for the end of the backward."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Computation and link of a step, each of which does one thing at a time. Times are seconds
    after the start of the step.
    """

    computed: float
    """Time at which the computation ends."""
    arrived: float
    """Time at which the computation and all communication have ended."""
    busy: float
    """Seconds in which the link is in use."""


def replicated(before: float, backward: float, buckets: Sequence[QueuedBucket]) -> Overlap:
    """Simulate a step in which every rank holds the model. `before`: seconds until the last
    backward starts, the only one in which gradients are sent.
    """
    computed = before + backward
    early = [(bucket.early, before + bucket.ready * backward) for bucket in buckets]
    late = [(bucket.late, computed) for bucket in buckets]
    link = busy = 0.0
    for seconds, ready in early + late:
        if seconds:
            link = max(link, ready) + seconds
            busy += seconds
    return Overlap(computed, max(computed, link), busy)


@dataclass(frozen=True, slots=True)
class StepCommunication:
    """Communication of a step. If ranks synchronize every H steps, 1/H of a synchronization."""

    exposed: float
    """Seconds of communication during which nothing is computed."""
    busy: float
    """Seconds in which the link is in use."""
    sent: float
    """Bytes sent by the rank that sends most."""


@dataclass(frozen=True, slots=True)
class CommunicatingRanks:
    """Ranks that communicate, and the network between them."""

    workers: int
    network: Network
    software: float = 0.0
    """Minimum seconds of a collective, on any network."""

    def cost(self, message: Message) -> Cost:
        name = "ring" if message.algorithm == "native" else message.algorithm
        return cost(self.network, message.kind, name, self.workers)

    def small(self, bytes: float) -> float:
        """Return the seconds of an all-reduce of the library's own numbers, `bytes` in size."""
        ring = cost(self.network, "all_reduce", "ring", self.workers)
        doubling = cost(self.network, "all_reduce", "recursive_doubling", self.workers)
        fastest = ring if ring.seconds(bytes) <= doubling.seconds(bytes) else doubling
        return self._seconds(fastest, bytes)

    def seconds(self, messages: Iterable[Message]) -> float:
        """Return the seconds of these messages, one after the other."""
        return sum(self._seconds(self.cost(message), message.bytes) for message in messages)

    def _seconds(self, price: Cost, bytes: float) -> float:
        if not bytes or not price.rounds:
            return 0.0
        return max(self.software, price.latency) + bytes * price.per_byte

    def sent(self, messages: Iterable[Message]) -> float:
        """Return the bytes that the rank that sends most sends for these messages."""
        return sum(self.cost(message).sends * message.bytes for message in messages)


def communication_of(
    method: Parallelism, rank: RankWork, ranks: CommunicatingRanks
) -> StepCommunication:
    """Return the communication of a step. `rank`: the work of the slowest rank, with its delay
    included.
    """
    if ranks.workers == 1:
        return StepCommunication(exposed=0.0, busy=0.0, sent=0.0)
    if method.local is not None:
        return _synchronization(method, rank, ranks)
    return _every_step(method, rank, ranks)


def _every_step(
    method: Parallelism, rank: RankWork, ranks: CommunicatingRanks
) -> StepCommunication:
    """Return the communication if ranks synchronize in every step: the facts of a step, all
    gradients, BatchNorm's buffers, and for a sharded update an all-gather of the parameters.
    """
    facts = ranks.small(rank.facts) if rank.facts else 0.0
    buckets = [QueuedBucket(0.0, facts, 0.0)]
    sent = 0.0
    gathers = []
    for bucket in rank.buckets:
        sends = messages(method, bucket, rank.width, ranks.workers)
        late = ranks.seconds(message for message in sends if message.late)
        early = ranks.seconds(sends) - late
        buckets.append(QueuedBucket(bucket.ready, early, late))
        sent += ranks.sent(sends)
        if method.update == "sharded":
            gathers.append(Message("all_gather", "native", rank.width * bucket.elements))
    overlap = replicated(rank.computation - rank.backward, rank.backward, buckets)
    after = ranks.small(rank.buffers) if rank.buffers else 0.0
    after += ranks.seconds(gathers)
    exposed = overlap.arrived - overlap.computed + after
    return StepCommunication(exposed, overlap.busy + after, sent + ranks.sent(gathers))


def _synchronization(
    method: Parallelism, rank: RankWork, ranks: CommunicatingRanks
) -> StepCommunication:
    """Return the communication of local steps: every H steps, after the backward, replicas send the
    change of their weights. With `overlap`, the next steps are computed at the same time.
    """
    assert method.local is not None
    every = method.sync_every or 1
    sends: list[Message] = []
    for bucket in rank.buckets:
        sends += messages(method, bucket, rank.width, ranks.workers)
    seconds = ranks.seconds(sends)
    hidden = method.local.overlap * (rank.computation + rank.optimizer)
    exposed = max(0.0, seconds - hidden)
    return StepCommunication(exposed / every, seconds / every, ranks.sent(sends) / every)
