"""A plan of flat buckets: in which bucket, and where in it, each parameter's gradient lies.

Gradients travel in buckets, because one message per tensor pays the latency once per tensor. A
bucket holds gradients of one dtype on one device. Inside it every gradient starts at a multiple of
64 elements, so that a slice of a bucket never cuts through the vector width of an optimizer kernel.
The plan depends on the parameters and their order alone, never on the world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

ALIGNMENT = 64  # elements
FIRST_BUCKET = 2**20  # bytes: small, so that the first message leaves early in the backward
BUCKET = 25 * 2**20  # bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """What the plan needs to know of one parameter."""

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Span:
    """One gradient's place in a bucket: elements [start, stop). `parameter` is its number in the
    list that was planned. Shards use it for a part of a parameter (updates/shards.py, pieces_of).
    """

    parameter: int
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A bucket before it has memory: `numel` elements, the gaps between spans included."""

    index: int
    dtype: torch.dtype
    device: torch.device
    numel: int
    spans: tuple[Span, ...]
    flag: int | None = None
    """The index of an element behind the last bucket's gradients; None in other buckets. Every
    rank adds its number of missing gradients there, which needs no message of its own.
    """


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets, in the order in which they leave."""

    order: tuple[int, ...]
    buckets: tuple[BucketPlan, ...]

    @property
    def bytes(self) -> int:
        return sum(bucket.numel * bucket.dtype.itemsize for bucket in self.buckets)

    def kinds(self) -> tuple[list[int], list[torch.dtype]]:
        """The number of elements and the dtype of each bucket, to allocate shared memory."""
        sizes = [bucket.numel for bucket in self.buckets]
        dtypes = [bucket.dtype for bucket in self.buckets]
        return sizes, dtypes


def aligned(numel: int) -> int:
    """`numel` rounded up to the alignment."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def plan(
    entries: Sequence[Entry],
    order: Sequence[int],
    *,
    bucket: int = BUCKET,
    first_bucket: int = FIRST_BUCKET,
    caps: Sequence[int] = (),
) -> Layout:
    """Put the entries into buckets, in `order`. A bucket is closed as soon as it holds `bucket`
    bytes (the first: `first_bucket`). With `caps`, bucket n is closed at caps[n] bytes, and all
    later ones at the last cap.

    So only the last bucket of a kind can be small: a large gradient joins the small ones before it,
    as in torch's wrapper. Buckets are closed per (dtype, device) and numbered in the order in which
    their last gradient is expected.
    """
    assert sorted(order) == list(range(len(entries))), "order is a permutation of the entries"
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    # bytes in the bucket that is being filled
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[int]] = []
    caps = caps or (first_bucket, bucket)
    for number in order:
        entry = entries[number]
        kind = (entry.dtype, entry.device)
        filling.setdefault(kind, []).append(number)
        filled[kind] = filled.get(kind, 0) + aligned(entry.numel) * entry.dtype.itemsize
        cap = caps[min(len(closed), len(caps) - 1)]
        if filled[kind] >= cap:
            closed.append(filling.pop(kind))
            filled[kind] = 0
    closed += filling.values()
    turn_of = {number: index for index, number in enumerate(order)}
    closed.sort(key=lambda members: turn_of[members[-1]])
    buckets = [_bucket(index, members, entries) for index, members in enumerate(closed)]
    last = buckets[-1]
    buckets[-1] = replace(last, numel=last.numel + ALIGNMENT, flag=last.numel)
    return Layout(tuple(order), tuple(buckets))


def _bucket(index: int, members: Sequence[int], entries: Sequence[Entry]) -> BucketPlan:
    spans = []
    start = 0
    for number in members:
        entry = entries[number]
        spans.append(Span(number, entry.name, start, start + entry.numel))
        start += aligned(entry.numel)
    first = entries[members[0]]
    return BucketPlan(index, first.dtype, first.device, start, tuple(spans))
