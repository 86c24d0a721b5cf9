"""By which collectives a bucket of gradients travels, for every way to sum and to compress: what
the reductions of gradients/ issue.

    native, ring, ...       the bucket, by that algorithm
    bf16, fp16, int8        slices to their owners, sums to everybody; int8 with a float32 for every
                            64 elements
    powersgd:r              P [n, r] of every matrix, with all vectors, then Q [m, r]; a matrix that
                            would not get smaller travels whole
    topk:s                  8 bytes for each of the s n largest elements, from every rank to every
                            other one
    central                 one tensor after the other through rank 0

What leaves in the middle of the backward is hidden behind the rest of it. What a bucket sends as an
answer to its first message waits for the backward's end, as the code does, and so does all that is
summed in shared memory or through rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.collectives.schedule import Kind
from lockstep.config.parallelism import Compression, Parallelism
from lockstep.errors import UsageError
from lockstep.gradients.layout import ALIGNMENT
from lockstep.tools.plan.work import WIDTH
from lockstep.tools.timing.profile import Leaves

INT8_BLOCK = ALIGNMENT  # elements that share a scale
_AT_THE_END = ("central", "shared_memory")


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of a bucket. `bytes` are of the tensor that all ranks sum, or of what all of
    them have together in the end.
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
    """It leaves when the backward is over."""


def messages(method: Parallelism, bucket: Leaves, width: float, workers: int) -> list[Message]:
    """Of one bucket, in the order in which they leave."""
    if method.compression is not None:
        return _compressed(method.compression, bucket, workers)
    name = "native" if method.reduce in ("auto", "native") else method.reduce
    late = name in _AT_THE_END
    if name == "central":
        each = bucket.tensors or ((bucket.elements,),)
        return [Message("all_reduce", "central", width * math.prod(shape), late) for shape in each]
    return [Message("all_reduce", name, width * bucket.elements, late)]  # type: ignore[arg-type]  # Parallelism has refused other names


def _compressed(compression: Compression, bucket: Leaves, workers: int) -> list[Message]:
    if compression.kind == "topk":
        assert compression.amount is not None
        # a value and its place
        chosen = math.ceil(compression.amount * bucket.elements) * (WIDTH + 4)
        return [Message("all_gather", "native", workers * chosen)]
    if compression.kind == "powersgd":
        assert compression.amount is not None
        if not bucket.tensors:
            raise UsageError(
                f"compress={str(compression)!r}: the shapes of this model's tensors are not known,"
                " and its factors depend on them"
            )
        first, second = _factors(bucket.tensors, int(compression.amount))
        found = [
            Message("all_reduce", "native", WIDTH * first),
            Message("all_reduce", "native", WIDTH * second, late=True),
        ]
        return [each for each in found if each.bytes]
    each = 1 + 4 / INT8_BLOCK if compression.kind == "int8" else 2
    sent = each * bucket.elements
    return [Message("all_to_all", "direct", sent), Message("all_gather", "native", sent, late=True)]


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
