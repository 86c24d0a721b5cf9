"""A Reduction (gradients/reductions.py) whose buckets travel compressed: what all ways of compressing have in common."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from lockstep.collectives.group import Done, Group, Work, asks
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.compression.error_feedback import Owed, working
from lockstep.gradients.layout import ALIGNMENT, Layout
from lockstep.gradients.reductions import private
from lockstep.method import Compression

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Stages = Generator[Work, None, tuple[Tensor, Tensor | None]]
"""Collectives, each of which is begun when those before it are done. In the end the sum over all ranks, equal on all of them, and what
this rank could not send of its own part of it."""


class Way(Protocol):
    """One way to compress."""

    owes: bool
    """Whether it leaves out something that error feedback has to bring back."""

    def sum(self, flat: Tensor, bucket: Bucket) -> Stages:
        """Sum `flat` over all ranks: the gradients of `bucket`, with what was owed of them, in float32 or float64."""
        ...

    def kept(self) -> Mapping[str, Tensor]:
        """What it remembers from step to step, on all ranks alike."""
        ...

    def take_back(self, common: Mapping[str, Tensor]) -> None: ...


class Compressed:
    """The first stage of a bucket leaves in the backward, the others in `wait`, that is, in the order of buckets on every rank.

    A bucket whose sum is not finite leaves what is owed as it was: a nan never gets into it. Such a step is skipped, and what the other
    buckets paid in it of their debts is lost with it, as its gradient is.
    """

    carries_all = False
    divisor: float | None = None

    def __init__(self, compression: Compression, way: Way, group: Group) -> None:
        self.name = str(compression)
        self._way = way
        self._owed = Owed(group) if way.owes else None

    def scatter(self) -> None:
        """Every rank gets all of the sum."""

    def memory(self, layout: Layout) -> list[Tensor]:
        for plan in layout.buckets:
            if plan.dtype not in _FLOATS:
                dtype = str(plan.dtype).removeprefix("torch.")
                raise UsageError(
                    f"compress={self.name!r}: the gradient of {plan.spans[0].name!r} is {dtype}, and only real floating-point numbers can be compressed"
                )
        if self._owed is not None:
            self._owed.lay(layout)
        return private(layout)

    def start(self, bucket: Bucket) -> Work:
        numel = bucket.sum.numel() - (0 if bucket.flag is None else ALIGNMENT)
        return _Staged(self._stages(bucket, bucket.sum.data[:numel])) if numel else Done()

    def _stages(self, bucket: Bucket, gradients: Tensor) -> Generator[Work]:
        flat = gradients.to(working(gradients.dtype))
        owed = None if self._owed is None else self._owed.of(bucket.index, flat.numel())
        if owed is not None:
            flat += owed
        total, left = yield from self._way.sum(flat, bucket)
        if owed is not None and left is not None:
            torch.where(total.isfinite().all(), left, owed, out=owed)  # decided on the device: nobody waits for it
        for span in bucket.spans:  # and nothing between them: it would never be cleared
            gradients[span.start : span.stop].copy_(total[span.start : span.stop])

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        return self._way.kept(), {} if self._owed is None else self._owed.kept()

    def take_back(self, common: Mapping[str, Tensor], by_rank: Sequence[Mapping[str, Tensor]]) -> None:
        self._way.take_back(common)
        if self._owed is not None:
            self._owed.take_back(by_rank)


class _Staged:
    """Stages of which the first has begun."""

    def __init__(self, stages: Generator[Work]) -> None:
        self._stages = stages
        self._work: Work | None = next(stages, None)

    def wait(self, timeout: timedelta | None = None) -> None:
        """A second call does nothing; one after a timeout goes on where that one was."""
        while self._work is not None:
            self._work.wait(timeout)
            self._work = next(self._stages, None)

    def done(self) -> bool:
        """Whether the stage that has begun is, without waiting: the others begin when they are waited for."""
        done = None if self._work is None else asks(self._work)
        return self._work is None or (done is not None and done())
